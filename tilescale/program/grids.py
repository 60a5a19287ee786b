# SPDX-License-Identifier: MIT
"""Values of expressions in all programs of a grid at once, where they follow from numbers that are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang_core import formulas, ir
from tilescale.hda import Machine
from tilescale.program.extents import evaluate
from tilescale.program.model import DevicePhase, GridPhase, Launch
from tilescale.program.operations import Rank, operation

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    **formulas.ARITHMETIC,
    ir.Min: np.minimum,
    ir.Max: np.maximum,
    ir.And: np.logical_and,
    ir.Or: np.logical_or,
}


class UnknownValue(Exception):
    """A value that is not known before the launch."""


@dataclass
class GridValues:
    """Values of the variables of a phase.

    Attributes:
        count: how many programs.
        known: variables with the values they have in each program of the grid, in the order in which programs start.
        free: variables that take several values, with how many.
        bound: variables that stand for an expression.
        loaded: what elements of tensors are taken for; None: they are not known.
    """

    count: int
    known: dict[ir.Var, Any]
    free: dict[ir.Var, int] = field(default_factory=dict)
    bound: dict[ir.Var, Any] = field(default_factory=dict)
    loaded: int | None = None

    def value(self, expr: ir.PrimExpr, at: Mapping[ir.Var, int]) -> Any:
        """An expression's value: a number, or an array of those in each program. Raises Unknown."""
        if isinstance(expr, int | ir.IntImm):
            return int(expr)
        if isinstance(expr, ir.Var):
            for values in (self.known, at):
                if expr in values:
                    return values[expr]
            if expr in self.bound:
                return self.value(self.bound[expr], at)
        if isinstance(expr, ir.Cast):
            return self.value(expr.value, at)
        if isinstance(expr, ir.BufferLoad) and self.loaded is not None:
            return self.loaded
        if isinstance(expr, ir.Not):
            return np.logical_not(self.value(expr.a, at))
        rule = _ARITHMETIC.get(type(expr))
        if rule is None:
            raise UnknownValue
        return rule(self.value(expr.a, at), self.value(expr.b, at))

    def depends_on(self, expr: ir.PrimExpr) -> set[ir.Var]:
        """The free variables that an expression depends on."""
        found: set[ir.Var] = set()
        for var in ir.variables(expr) if isinstance(expr, ir.PrimExpr) else ():
            if var in self.bound:
                found |= self.depends_on(self.bound[var])
            elif var in self.free:
                found.add(var)
        return found


def programs(launch: Launch, sizes: Mapping[str, int]) -> int | None:
    """Number of programs of the grid; None if it is known only at launch."""
    shape = _shape(launch, sizes)
    known = _slowest(shape)
    return math.prod(known) if len(known) == len(shape) else None


def _shape(launch: Launch, sizes: Mapping[str, int]) -> list[int | None]:
    known = {var: sizes[name] for name, var in launch.extents if isinstance(var, ir.Var)}
    return [evaluate(n, known) for n in launch.grid]


def _slowest(shape: list[int | None]) -> list[int]:
    """The last extents, which vary slowest, as far as they are known."""
    unknown = [axis for axis, n in enumerate(shape) if n is None]
    return [n for n in shape[unknown[-1] + 1 if unknown else 0 :] if n is not None]


def grid_of(
    phase: DevicePhase | GridPhase,
    launch: Launch,
    machine: Machine,
    sizes: Mapping[str, int],
    ranks: Mapping[str, int] | None = None,
    in_part: bool = False,
) -> GridValues | None:
    """The variables of a phase; None for a grid of unknown extent.

    Args:
        sizes: units of each launched level.
        ranks: of the unit that executes it; without, each of its ranks takes all values.
        in_part: take a grid of unknown extent as one of its slowest axes with known extents: programs with the same
            position on these count as one program.
    """
    whole = _shape(launch, sizes) if isinstance(phase, GridPhase) else []
    shape = _slowest(whole)
    is_whole = len(shape) == len(whole)
    if not is_whole and not in_part:
        return None
    number = np.arange(math.prod(shape))
    axes = np.unravel_index(number, shape, order="F") if shape else ()
    grid = GridValues(number.size, dict(zip(launch.programs[len(whole) - len(shape) :], axes, strict=False)))
    grid.known |= {var: sizes[name] for name, var in launch.extents if isinstance(var, ir.Var)}
    for stmt in ir.statements(phase.stmt):
        extent = ir.constant(stmt.extent) if isinstance(stmt, ir.For) and ir.constant(stmt.min) == 0 else None
        if extent is not None:
            grid.free[stmt.loop_var] = extent
        elif isinstance(stmt, ir.Bind):
            rank = operation(stmt.value)
            if not isinstance(rank, Rank):
                grid.bound[stmt.var] = stmt.value
            elif ranks is not None and rank.level in ranks:
                grid.known[stmt.var] = ranks[rank.level]
            elif rank.level in sizes:
                grid.free[stmt.var] = sizes[rank.level]
            elif is_whole and machine.level(rank.level).kind == "program" and launch.cluster_size == 1:
                grid.known[stmt.var] = number
    return grid
