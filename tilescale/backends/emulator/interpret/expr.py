# SPDX-License-Identifier: MIT
"""Expressions of TIR as closures over a frame."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import IfThenElse
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.access import element, python_int
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import VALUES, expression
from tilescale.backends.emulator.numerics import BINARY, INTRINSICS, convert, numpy_dtype, select
from tilescale.errors import UnsupportedError


def value_dtype(expr: ir.PrimExpr) -> np.dtype:
    """The numpy type of an expression's value."""
    return numpy_dtype(str(expr.dtype))


@expression(ir.IntImm)
def _int(compiler: Compiler, expr: ir.IntImm) -> Closure:
    value = bool(expr.value) if str(expr.dtype) == "bool" else int(expr.value)
    return lambda frame: value


@expression(ir.FloatImm)
def _float(compiler: Compiler, expr: ir.FloatImm) -> Closure:
    value = convert(float(expr.value), value_dtype(expr))
    return lambda frame: value


@expression(ir.StringImm)
def _string(compiler: Compiler, expr: ir.StringImm) -> Closure:
    value = str(expr.value)
    return lambda frame: value


@expression(ir.Var)
def _variable(compiler: Compiler, expr: ir.Var) -> Closure:
    if expr in compiler.deferred:
        return compiler.expr(compiler.deferred[expr])
    slot = compiler.slot(expr)
    return lambda frame: frame.slots[slot]


@expression(
    ir.Add, ir.Sub, ir.Mul, ir.Div, ir.Mod, ir.FloorDiv, ir.FloorMod, ir.Min, ir.Max,
    ir.EQ, ir.NE, ir.LT, ir.LE, ir.GT, ir.GE,
)  # fmt: skip
def _binary(compiler: Compiler, expr: ir.PrimExpr) -> Closure:
    function = BINARY[type(expr).__name__]
    left, right = compiler.expr(expr.a), compiler.expr(expr.b)
    dtype = value_dtype(expr)
    return lambda frame: function(left(frame), right(frame), dtype)


@expression(ir.And, ir.Or)
def _logical(compiler: Compiler, expr: ir.PrimExpr) -> Closure:
    """Short-circuit: the right side is evaluated only where the left one does not decide, as bounds checks require."""
    left, right = compiler.expr(expr.a), compiler.expr(expr.b)
    stops = isinstance(expr, ir.Or)

    def run(frame: Frame) -> Any:
        first = left(frame)
        if not is_vector(first):
            return bool(first) if bool(first) == stops else right(frame)
        open_ = ~first if stops else first
        second = under(frame, open_, right)
        return first | second if stops else first & second

    return run


@expression(ir.Not)
def _not(compiler: Compiler, expr: ir.Not) -> Closure:
    inner = compiler.expr(expr.a)

    def run(frame: Frame) -> Any:
        value = inner(frame)
        return ~value if is_vector(value) else not value

    return run


@expression(ir.Select)
def _select(compiler: Compiler, expr: ir.Select) -> Closure:
    return choose(compiler, expr.condition, expr.true_value, expr.false_value, value_dtype(expr))


def choose(
    compiler: Compiler, condition: ir.PrimExpr, then: ir.PrimExpr, otherwise: ir.PrimExpr, dtype: np.dtype
) -> Closure:
    """One of two values by a condition; each side is evaluated only where it is selected."""
    test, left, right = compiler.expr(condition), compiler.expr(then), compiler.expr(otherwise)

    def run(frame: Frame) -> Any:
        taken = test(frame)
        if not is_vector(taken):
            return left(frame) if taken else right(frame)
        return select(taken, under(frame, taken, left), under(frame, ~taken, right), dtype)

    return run


def under(frame: Frame, condition: np.ndarray, closure: Closure) -> Any:
    """A closure's value with the mask narrowed by a condition."""
    saved = frame.mask
    frame.mask = condition if saved is None else saved & condition
    try:
        return closure(frame)
    finally:
        frame.mask = saved


@expression(ir.Cast)
def _cast(compiler: Compiler, expr: ir.Cast) -> Closure:
    inner, dtype = compiler.expr(expr.value), value_dtype(expr)
    if dtype.kind in "iub":
        return lambda frame: python_int(convert(inner(frame), dtype))
    return lambda frame: convert(inner(frame), dtype)


@expression(ir.Let)
def _let(compiler: Compiler, expr: ir.Let) -> Closure:
    slot, value, body = compiler.slot(expr.var), compiler.expr(expr.value), compiler.expr(expr.body)

    def run(frame: Frame) -> Any:
        frame.slots[slot] = value(frame)
        return body(frame)

    return run


@expression(ir.BufferLoad)
def _load(compiler: Compiler, expr: ir.BufferLoad) -> Closure:
    return element(compiler, expr.buffer, expr.indices).load


@expression(ir.Call)
def _call(compiler: Compiler, expr: ir.Call) -> Closure:
    name = ir.op_name(expr) or ""
    if name == tl.IF_THEN_ELSE:
        choice = IfThenElse.of(expr)
        return choose(compiler, choice.condition, choice.then, choice.otherwise, value_dtype(expr))
    rule = VALUES.get(name)
    if rule is not None:
        return rule(compiler, expr)
    function = INTRINSICS.get(name)
    if function is None:
        raise UnsupportedError(f"the emulator does not run {name or expr.op}: {expr}")
    closures, dtype = [compiler.expr(a) for a in expr.args], value_dtype(expr)
    return lambda frame: python_int(function(*[c(frame) for c in closures], dtype=dtype))
