# SPDX-License-Identifier: MIT
"""Symbolic extents: their values, the constraints of a call's argument shapes, and extents that are equal on all ranks.

The only ones in which ranks may differ are the rows of tensors of an all-to-all of unequal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tilelang_core import ir
from tilelang_core.formulas import formula
from tilescale.errors import ArgumentError
from tilescale.program.effects import phases, statements
from tilescale.program.model import Parameter, Program
from tilescale.program.operations import Collective, operation
from tilescale.program.ops import ALL_TO_ALL_V

UNFIT = "sent has a number from 0 on for each rank, and no more rows than src; dst holds all received rows"
"""Hint for rows that do not fit."""


def evaluate(expr: ir.PrimExpr | int, known: Mapping[ir.Var, float]) -> int | None:
    """An expression as a number; None if it depends on variables that are not known."""
    value = formula(expr).value(known)
    if value is not None:
        return value
    return ir.constant(ir.substitute(expr, {var: _immediate(str(var.dtype), n) for var, n in known.items()}))


def _immediate(dtype: str, value: float) -> ir.PrimExpr:
    return ir.FloatImm(dtype, value) if "float" in dtype else ir.IntImm(dtype, int(value))


def solve(
    parameters: Iterable[Parameter], shapes: Iterable[Sequence[int] | None], known: Mapping[ir.Var, float] | None = None
) -> dict[ir.Var, float]:
    """The variables in the shapes of parameters, from the shapes that a unit passes.

    Where no other extent has n, that of a shard, n // units, says that n is units times as large. A variable that no
    shape determines is not in the result. Raises ArgumentError: an extent that no value of its variable makes, such as
    7 for 4 * n.

    Args:
        shapes: the shape that a unit passes for each parameter; None for a scalar, and for an absent tensor.
        known: numbers of units that a launch leaves open, and scalars; in the result too.
    """
    solved = dict(known or {})
    pairs = [
        (parameter, extent, size)
        for parameter, shape in zip(parameters, shapes, strict=True)
        for extent, size in zip(parameter.shape, shape or (), strict=False)
    ]
    exact = [pair for pair in pairs if not formula(pair[1]).divides]
    for left in (exact, pairs):
        before = -1
        while before != len(left):  # one extent may determine a variable of another one
            before = len(left)
            left = [pair for pair in left if not _solved(*pair, solved)]
    return solved


def _solved(parameter: Parameter, extent: Any, size: int, solved: dict[ir.Var, float]) -> bool:
    """Whether all variables of an extent are known, the one that is missing by what its size says."""
    unknown = formula(extent).variables - solved.keys()
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
    """The value of `var` for which an expression has a value; None if unknown. Raises ValueError if there is none."""
    while not expr.same_as(var):
        rule = _INVERSES.get(type(expr))
        if rule is None:
            return None
        is_left = var in formula(expr.a).variables
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
"""Inverse of an operation: from its value, one operand and the position of the missing one to the other operand.

A quotient has no rest: shards divide.
"""


def inside_expressions(program: Program) -> frozenset[ir.Var]:
    """Variables of extents that are not a plain n, such as that of a shard, n // units: such a tensor does not
    determine n."""
    shapes = [*(p.shape for p in program.parameters), *(b.shape for launch in program.launches for b in launch.buffers)]
    return frozenset(
        var for shape in shapes for extent in shape if not isinstance(extent, ir.Var) for var in ir.variables(extent)
    )


def unfit(gets: bool, rows: object, room: int) -> str:
    """Describe rows that do not fit a rank's tensor: received rows if it `gets` them, else sent rows."""
    return f"{'gets' if gets else 'sends'} {rows} rows, {'dst' if gets else 'src'} has {room}"


def lengths(program: Program) -> frozenset[ir.Var]:
    """Extents that only bound a tensor of unequal parts. All other extents are equal on all ranks."""
    ends: Counter[ir.Var] = Counter()
    uses: Counter[ir.Var] = Counter()
    for stmt, *_ in statements(program.body):
        uses.update(ir.uses(stmt))
        if isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == ALL_TO_ALL_V.name:
            made = operation(stmt.value)
            assert isinstance(made, Collective)
            rows = (ir.region_parts(tile)[2][0] for tile in made.tiles)
            ends.update(n for n in rows if isinstance(n, ir.Var))
    launches = {launch for _, launch in phases(program.body) if launch is not None}
    decided = [n for launch in launches for n in launch.grid]
    decided += [n for launch in launches for buffer in launch.buffers for n in buffer.shape]
    fixed = {var for expr in decided for var in ir.variables(expr)}
    return frozenset(var for var, count in ends.items() if uses[var] == count and var not in fixed)


def agreed(program: Program) -> list[tuple[Parameter, ir.Var]]:
    """The other variables of extents, which all ranks have alike, and the parameters that have them, in their order."""
    extents = [(p, extent) for p in program.parameters if p.buffer is not None for extent in p.buffer.shape]
    symbolic = [(p, var) for p, extent in extents for var in sorted(ir.variables(extent), key=str)]
    own = lengths(program) if symbolic else frozenset()
    return [(p, var) for p, var in symbolic if var not in own]
