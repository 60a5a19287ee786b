# SPDX-License-Identifier: MIT
"""Rules of stock TileLang for functions before lowering: the checks, and indices from the end."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import tilelang.transform
from tilelang.engine.semantic_check import PreLowerSemanticCheck
from tvm import IRModule, tirx
from tvm.ir import structural_equal
from tvm.tirx.stmt_functor import post_order_visit

from tilelang_core.prover import proving
from tilelang_core.rewrite import at

_MARK = "[Tilelang Semantic Check] "
_OPERATION = re.compile(r'"ir\.Op\(.*?name="([^"]*)".*\)"')
"""The form in which its message prints an operation."""

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.Not)
_NOT_BELOW_ZERO = (tirx.StringImm, *_COMPARISONS)

_LOWER_BOUNDS: dict[type, Callable[[float, float], float]] = {
    tirx.Add: operator.add,
    tirx.Mul: lambda a, b: a * b if a >= 0 and b >= 0 else -math.inf,
    tirx.Div: lambda a, b: 0 if a >= 0 and b >= 0 else -math.inf,
    tirx.FloorDiv: lambda a, b: 0 if a >= 0 and b >= 0 else -math.inf,
    tirx.Min: min,
    tirx.Max: max,
}
"""Of two operands' lower bounds, that of the operation."""

_SOME_EXTENT = 1 << 16
"""Any number of elements that some run has."""


def broken_rule(func: tirx.PrimFunc) -> tuple[str, tirx.Stmt] | None:
    """TileLang's objection to a function and the innermost loop that it applies to; None if TileLang accepts it."""
    said = _against(func)
    if said is None:
        return None
    loops: list[tirx.Stmt] = []
    post_order_visit(func.body, lambda node: loops.append(node) if isinstance(node, tirx.For) else None)
    for loop in loops:
        of_loop = _against(func.with_body(loop))
        if of_loop is not None:
            return of_loop, loop
    return said, func.body


def counted_from_the_begin(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with indices that are always negative counted from the end, as TileLang has them."""
    if not _may_count_from_the_end(func):
        return func  # TileLang's pass can take a second to try to prove that they are
    with proving():
        counted = tilelang.transform.LegalizeNegativeIndex()(IRModule({"main": func}))["main"]
    if structural_equal(func, counted):
        return func
    for old, new in zip(_statements(func), _statements(counted), strict=True):
        at(new, like=old)
    return counted


def _may_count_from_the_end(func: tirx.PrimFunc) -> bool:
    """Whether an index may be below zero in every run."""
    indices: list[tirx.PrimExpr] = []
    shapes = [extent for buffer in func.buffer_map.values() for extent in buffer.shape]
    values: dict[tirx.Var, tirx.PrimExpr | float] = {n: _SOME_EXTENT for n in shapes if isinstance(n, tirx.Var)}

    def collect(node: Any) -> None:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            indices.extend(node.indices)
        elif isinstance(node, tirx.For):
            values[node.loop_var] = node.min
        elif isinstance(node, tirx.Bind | tirx.Let):
            values[node.var] = node.value

    post_order_visit(func.body, collect)
    return any(_least(index, values) < 0 for index in indices)


def _least(value: tirx.PrimExpr | float, values: dict[tirx.Var, tirx.PrimExpr | float]) -> float:
    """A lower bound in runs in which a program reads numbers above zero, and is given none below it. `values`: of
    variables; those that were looked at become their lower bounds."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, tirx.IntImm):
        return value.value
    if isinstance(value, tirx.Var):
        values[value] = least = _least(values.get(value, 0), values)
        return least
    if isinstance(value, tirx.BufferLoad):
        return 1
    if isinstance(value, _NOT_BELOW_ZERO):
        return 0
    if isinstance(value, tirx.Cast):
        return _least(value.value, values)
    if isinstance(value, tirx.Sub):
        return _least(value.a, values) - value.b.value if isinstance(value.b, tirx.IntImm) else -math.inf
    if isinstance(value, tirx.Select):
        return min(_least(value.true_value, values), _least(value.false_value, values))
    if isinstance(value, tirx.FloorMod):
        return min(0, _least(value.b, values))
    if isinstance(value, tirx.Call):
        return min((_least(arg, values) for arg in value.args), default=0)
    bound = _LOWER_BOUNDS.get(type(value))
    return bound(_least(value.a, values), _least(value.b, values)) if bound else -math.inf


def _statements(func: tirx.PrimFunc) -> list[tirx.Stmt]:
    found: list[tirx.Stmt] = []
    post_order_visit(func.body, lambda node: found.append(node) if isinstance(node, tirx.Stmt) else None)
    return found


def _against(func: tirx.PrimFunc) -> str | None:
    try:
        PreLowerSemanticCheck(IRModule({"main": func}))
    except ValueError as error:
        said = str(error).rpartition(_MARK)[2].splitlines()[0]
        return _OPERATION.sub(r"\1", said)
    return None
