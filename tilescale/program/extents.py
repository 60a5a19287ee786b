# SPDX-License-Identifier: MIT
"""Symbolic extents: their values, and what the shapes of a call's arguments say of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilelang_core import ir
from tilescale.program.model import Parameter, Program


def evaluate(expr: ir.PrimExpr | int, known: Mapping[ir.Var, float]) -> int | None:
    """An expression as a number; None if it depends on variables that are not known."""
    if isinstance(expr, int | ir.IntImm):
        return int(expr)
    return ir.constant(ir.substitute(expr, {var: _immediate(str(var.dtype), n) for var, n in known.items()}))


def _immediate(dtype: str, value: float) -> ir.PrimExpr:
    return ir.FloatImm(dtype, value) if "float" in dtype else ir.IntImm(dtype, int(value))


def solve(
    parameters: Iterable[Parameter], shapes: Iterable[Sequence[int] | None], known: Mapping[ir.Var, float] | None = None
) -> dict[ir.Var, float]:
    """The variables in the shapes of parameters: n is the size of an extent n, or units times that of n // units.

    Args:
        shapes: what a unit passes for each parameter; None for a scalar.
        known: numbers of units that a launch leaves open, and scalars; in the result too.
    """
    solved = dict(known or {})
    for parameter, shape in zip(parameters, shapes, strict=True):
        for extent, size in zip(parameter.shape, shape or (), strict=False):
            if isinstance(extent, ir.Var):
                solved.setdefault(extent, size)
            elif isinstance(extent, ir.FloorDiv) and isinstance(extent.a, ir.Var):
                units = evaluate(extent.b, solved)
                if units is not None:
                    solved.setdefault(extent.a, size * units)
    return solved


def inside_expressions(program: Program) -> frozenset[ir.Var]:
    """Variables of extents that are no plain n, such as that of a shard, n // units: such a tensor does not show n."""
    shapes = [*(p.shape for p in program.parameters), *(b.shape for launch in program.launches for b in launch.buffers)]
    return frozenset(
        var for shape in shapes for extent in shape if not isinstance(extent, ir.Var) for var in ir.variables(extent)
    )
