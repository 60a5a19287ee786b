# SPDX-License-Identifier: MIT
"""Symbolic extents: their values, and what the shapes of a call's arguments say of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilelang_core import ir, tl
from tilescale.errors import ArgumentError
from tilescale.program.model import Parameter, Program


def evaluate(expr: ir.PrimExpr | int, known: Mapping[ir.Var, float]) -> int | None:
    """An expression as a number; None if it depends on variables that are not known."""
    if isinstance(expr, int | ir.IntImm):
        return int(expr)
    function = _function(expr)
    if function is not None:
        try:
            return int(function(known))
        except (KeyError, ZeroDivisionError):
            pass  # a variable that is not known may not matter
    return ir.constant(ir.substitute(expr, {var: _immediate(str(var.dtype), n) for var, n in known.items()}))


_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ir.Add: operator.add, ir.Sub: operator.sub, ir.Mul: operator.mul, ir.FloorDiv: operator.floordiv,
    ir.FloorMod: operator.mod, ir.Min: min, ir.Max: max, ir.EQ: operator.eq, ir.NE: operator.ne, ir.LT: operator.lt,
    ir.LE: operator.le, ir.GT: operator.gt, ir.GE: operator.ge,
}  # fmt: skip
"""What Python computes as TIR does, of integers."""

_Function = Callable[[Mapping[ir.Var, float]], Any]


@lru_cache(1 << 14)
def _function(expr: ir.PrimExpr) -> _Function | None:
    """An expression of integers as a function of its variables, as calls evaluate the same ones again and again."""
    if "float" in str(expr.dtype):
        return None
    if isinstance(expr, ir.IntImm):
        value = int(expr)
        return lambda known: value
    if isinstance(expr, ir.Var):
        return lambda known: known[expr]
    if ir.op_name(expr) == tl.IF_THEN_ELSE:
        condition, then, other = (_function(part) for part in expr.args)
        if condition is None or then is None or other is None:
            return None
        return lambda known: then(known) if condition(known) else other(known)
    operation = _OPERATIONS.get(type(expr))
    if operation is None:
        return None
    left, right = _function(expr.a), _function(expr.b)
    return None if left is None or right is None else lambda known: operation(left(known), right(known))


@lru_cache(1 << 14)
def variables(expr: ir.PrimExpr) -> frozenset[ir.Var]:
    """The variables of an expression."""
    return frozenset(ir.variables(expr))


def _immediate(dtype: str, value: float) -> ir.PrimExpr:
    return ir.FloatImm(dtype, value) if "float" in dtype else ir.IntImm(dtype, int(value))


def solve(
    parameters: Iterable[Parameter], shapes: Iterable[Sequence[int] | None], known: Mapping[ir.Var, float] | None = None
) -> dict[ir.Var, float]:
    """The variables in the shapes of parameters, from the shapes that a unit passes.

    Where no other extent has n, that of a shard, n // units, says that n is units times as large. A variable that no
    shape determines is not in the result.

    Args:
        shapes: what a unit passes for each parameter; None for a scalar, and for a tensor that is not there.
        known: numbers of units that a launch leaves open, and scalars; in the result too.

    Raises:
        ArgumentError: an extent that no value of its variable makes, such as 7 for 4 * n.
    """
    solved = dict(known or {})
    pairs = [
        (parameter, extent, size)
        for parameter, shape in zip(parameters, shapes, strict=True)
        for extent, size in zip(parameter.shape, shape or (), strict=False)
    ]
    exact = [pair for pair in pairs if not _is_divided(pair[1])]
    for left in (exact, pairs):
        before = -1
        while before != len(left):  # what one extent says may be what another one needs
            before = len(left)
            left = [pair for pair in left if not _solved(*pair, solved)]
    return solved


@lru_cache(1 << 14)
def _is_divided(extent: ir.PrimExpr | int) -> bool:
    return ir.contains(extent, lambda node: isinstance(node, ir.FloorDiv))


def _solved(parameter: Parameter, extent: Any, size: int, solved: dict[ir.Var, float]) -> bool:
    """Whether all variables of an extent are known, the one that is missing by what its size says."""
    if isinstance(extent, int):
        return True
    unknown = variables(extent) - solved.keys()
    if len(unknown) == 1:
        (var,) = unknown
        try:
            value = _inverse(extent, var, size, solved)
        except ValueError:
            raise ArgumentError(
                f"{parameter.name!r} has an extent of {size} where the program declares {extent}: no {var} makes that",
                hint=f"pass a tensor whose extent is {extent}",
            ) from None
        if value is None:
            return False
        solved[var] = value
    return len(unknown) <= 1


def _inverse(expr: ir.PrimExpr, var: ir.Var, value: int, known: Mapping[ir.Var, float]) -> int | None:
    """For which `var` an expression has a value; None: that cannot be said. Raises ValueError if for none."""
    while not expr.same_as(var):
        rule = _INVERSES.get(type(expr))
        if rule is None:
            return None
        is_left = var in variables(expr.a)
        other = evaluate(expr.b if is_left else expr.a, known)
        if other is None:
            return None
        found = rule(value, other, is_left)
        if found is None:
            return None
        expr, value = expr.a if is_left else expr.b, found
    if value < 0:
        raise ValueError
    return value


def _divided(value: int, other: int, is_left: bool) -> int:
    if other == 0 or value % other:
        raise ValueError
    return value // other


_INVERSES: dict[type, Callable[[int, int, bool], int | None]] = {
    ir.Add: lambda value, other, is_left: value - other,
    ir.Sub: lambda value, other, is_left: value + other if is_left else other - value,
    ir.Mul: _divided,
    ir.FloorDiv: lambda value, other, is_left: value * other if is_left else None,
}
"""Of an operation's value and one operand, the other: operand, value, and whether it is the left one that is missing.

A quotient has no rest: shards divide.
"""


def inside_expressions(program: Program) -> frozenset[ir.Var]:
    """Variables of extents that are no plain n, such as that of a shard, n // units: such a tensor does not show n."""
    shapes = [*(p.shape for p in program.parameters), *(b.shape for launch in program.launches for b in launch.buffers)]
    return frozenset(
        var for shape in shapes for extent in shape if not isinstance(extent, ir.Var) for var in variables(extent)
    )
