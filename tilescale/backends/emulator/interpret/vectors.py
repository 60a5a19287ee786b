# SPDX-License-Identifier: MIT
"""Vectors: expressions of several lanes, stores of them, and reinterpretation of their bits.

The closure of a vector returns a tuple with the scalar result of each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import IfThenElse, operand_of
from tilescale.backends.emulator.execute.frame import Frame, is_vector, spread
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.access import Element, element, python_int
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.expr import under
from tilescale.backends.emulator.interpret.registry import VECTORS, expression, value_operation, vector_operation
from tilescale.backends.emulator.numerics import (
    BINARY,
    INTRINSICS,
    convert,
    element_type,
    lanes_of,
    numpy_dtype,
    select,
)
from tilescale.errors import UnsupportedError


def is_of_vectors(expr: ir.PrimExpr) -> bool:
    """Whether an expression has more than one lane."""
    return lanes_of(str(expr.dtype)) > 1


def vector(compiler: Compiler, expr: ir.PrimExpr, count: int | None = None) -> Closure:
    """The closure of an expression as a tuple of its lanes; of a scalar one, `count` times its value. Raises
    UnsupportedError: a kind of vector expression that the emulator does not run."""
    if not is_of_vectors(expr):
        scalar = compiler.expr(expr)
        return lambda frame: (scalar(frame),) * (count or 1)
    rule = _RULES.get(type(expr), _elementwise if hasattr(expr, "a") else None)
    if rule is None:
        raise UnsupportedError(f"the emulator does not run {type(expr).__name__} expressions of vectors: {expr}")
    return rule(compiler, expr)


def element_dtype(expr: ir.PrimExpr) -> np.dtype:
    """The numpy type of one lane."""
    return numpy_dtype(element_type(str(expr.dtype)))


def _ramp(compiler: Compiler, expr: ir.Ramp) -> Closure:
    closures = [compiler.expr(expr.base + expr.stride * lane) for lane in range(lanes_of(str(expr.dtype)))]
    return lambda frame: tuple(c(frame) for c in closures)


def _broadcast(compiler: Compiler, expr: ir.Broadcast) -> Closure:
    return vector(compiler, expr.value, lanes_of(str(expr.dtype)))


def _variable(compiler: Compiler, expr: ir.Var) -> Closure:
    slot = compiler.slot(expr)
    return lambda frame: frame.slots[slot]


def _load(compiler: Compiler, expr: ir.BufferLoad) -> Closure:
    loads = [e.load for e in _elements(compiler, expr)]
    return lambda frame: tuple(load(frame) for load in loads)


def _elements(compiler: Compiler, access: Any) -> list[Element]:
    """The elements of a vector access: those along ramps, or the lanes of one element that is a vector itself."""
    buffer, indices = access.buffer, list(access.indices)
    lanes = lanes_of(str(buffer.dtype))
    if lanes > 1:
        return [element(compiler, buffer, [*indices, lane]) for lane in range(lanes)]
    lanes = max(lanes_of(str(i.dtype)) for i in indices)
    return [element(compiler, buffer, [_lane(i, lane) for i in indices]) for lane in range(lanes)]


def _lane(index: Any, lane: int) -> Any:
    if not is_of_vectors(index):
        return index
    if isinstance(index, ir.Ramp):
        return index.base + index.stride * lane
    if isinstance(index, ir.Broadcast):
        return index.value
    if isinstance(index, ir.Shuffle):
        return [_lane(v, n) for v in index.vectors for n in range(lanes_of(str(v.dtype)))][int(index.indices[lane])]
    if hasattr(index, "a"):
        return type(index)(_lane(index.a, lane), _lane(index.b, lane))
    raise UnsupportedError(f"the emulator does not run accesses at indices like {index}")


def _shuffle(compiler: Compiler, expr: ir.Shuffle) -> Closure:
    """The selected lanes of concatenated vectors."""
    parts, picks = [vector(compiler, v) for v in expr.vectors], [int(i) for i in expr.indices]

    def run(frame: Frame) -> tuple[Any, ...]:
        together = [value for part in parts for value in part(frame)]
        return tuple(together[i] for i in picks)

    return run


def _elementwise(compiler: Compiler, expr: ir.PrimExpr) -> Closure:
    count = lanes_of(str(expr.dtype))
    function, dtype = BINARY[type(expr).__name__], element_dtype(expr)
    left, right = vector(compiler, expr.a, count), vector(compiler, expr.b, count)
    return lambda frame: tuple(function(a, b, dtype) for a, b in zip(left(frame), right(frame), strict=True))


def _cast(compiler: Compiler, expr: ir.Cast) -> Closure:
    values, dtype = vector(compiler, expr.value), element_dtype(expr)
    return lambda frame: tuple(python_int(convert(value, dtype)) for value in values(frame))


def _select(compiler: Compiler, expr: ir.Select) -> Closure:
    return _choose(compiler, expr, expr.condition, expr.true_value, expr.false_value)


def _choose(
    compiler: Compiler, expr: ir.PrimExpr, condition: ir.PrimExpr, then: ir.PrimExpr, otherwise: ir.PrimExpr
) -> Closure:
    """One of two vectors by a scalar condition, where only the selected side is evaluated, or lane by lane."""
    count, dtype = lanes_of(str(expr.dtype)), element_dtype(expr)
    test = vector(compiler, condition)
    left, right = vector(compiler, then, count), vector(compiler, otherwise, count)

    def run(frame: Frame) -> tuple[Any, ...]:
        tests = test(frame)
        if len(tests) == 1 and not is_vector(tests[0]):
            return left(frame) if tests[0] else right(frame)
        if len(tests) == 1:
            found = under(frame, tests[0], left), under(frame, ~tests[0], right)
        else:
            found = left(frame), right(frame)
        return tuple(
            select(np.asarray(taken), a, b, dtype)
            for taken, a, b in zip(tests * (count // len(tests)), *found, strict=True)
        )

    return run


def _call(compiler: Compiler, expr: ir.Call) -> Closure:
    name = ir.op_name(expr) or ""
    if name == tl.IF_THEN_ELSE:
        choice = IfThenElse.of(expr)
        return _choose(compiler, expr, choice.condition, choice.then, choice.otherwise)
    if name in VECTORS:
        return VECTORS[name](compiler, expr)
    function = INTRINSICS.get(name)
    if function is None:
        raise UnsupportedError(f"the emulator does not run {name or expr.op} on vectors: {expr}")
    count, dtype = lanes_of(str(expr.dtype)), element_dtype(expr)
    values = [vector(compiler, arg, count) for arg in expr.args]
    return lambda frame: tuple(
        python_int(function(*lane, dtype=dtype)) for lane in zip(*[v(frame) for v in values], strict=True)
    )


_RULES: dict[type, Callable[[Compiler, Any], Closure]] = {
    ir.Ramp: _ramp,
    ir.Broadcast: _broadcast,
    ir.Var: _variable,
    ir.BufferLoad: _load,
    ir.Cast: _cast,
    ir.Select: _select,
    ir.Shuffle: _shuffle,
    ir.Call: _call,
}


def kept(compiler: Compiler, expr: ir.PrimExpr) -> Closure:
    """The closure of a vector that outlives the statement: no lane is a view of memory."""
    values = vector(compiler, expr)
    return lambda frame: tuple(v.copy() if is_vector(v) and v.base is not None else v for v in values(frame))


def store(compiler: Compiler, stmt: ir.BufferStore) -> Closure:
    """A store of a vector: all lanes are read before the first is written."""
    targets, values = _elements(compiler, stmt), kept(compiler, stmt.value)
    if not compiler.data:
        return forgotten(targets)

    def run(frame: Frame) -> None:
        for target, value in zip(targets, values(frame), strict=True):
            target.store(frame, value)

    return run


# -- bits --------------------------------------------------------------------------------------------------------------


def bits(values: Sequence[Any], dtype: np.dtype, wanted: np.dtype, frame: Frame) -> tuple[Any, ...]:
    """The bits of adjacent values, as elements of another type."""
    arrays = [np.asarray(convert(value, dtype)) for value in values]
    if any(a.ndim for a in arrays):
        arrays = [spread(a, frame) for a in arrays]
    together = np.ascontiguousarray(np.stack(arrays, axis=-1)).view(wanted)
    return tuple(python_int(together[..., lane][()]) for lane in range(together.shape[-1]))


@vector_operation(tl.REINTERPRET)
def _reinterpret(compiler: Compiler, call: ir.Call) -> Closure:
    given = operand_of(call)
    values, dtype, wanted = vector(compiler, given), element_dtype(given), element_dtype(call)
    return lambda frame: bits(values(frame), dtype, wanted, frame)


@value_operation(tl.REINTERPRET)
def _reinterpret_as_scalar(compiler: Compiler, call: ir.Call) -> Closure:
    if is_of_vectors(operand_of(call)):
        values = _reinterpret(compiler, call)
        return lambda frame: values(frame)[0]
    value, dtype, function = compiler.expr(operand_of(call)), element_dtype(call), INTRINSICS[tl.REINTERPRET]
    return lambda frame: python_int(function(value(frame), dtype=dtype))


@expression(ir.Shuffle)
def _extracted(compiler: Compiler, expr: ir.Shuffle) -> Closure:
    values = _shuffle(compiler, expr)
    return lambda frame: values(frame)[0]


expression(ir.Ramp, ir.Broadcast)(vector)
