# SPDX-License-Identifier: MIT
"""Lower a whole program for a target: device phases split, each grid as a TileLang function.

Before: a program's tree of phases. After: the same tree, of `HostStep`s and `LoweredGrid`s. Declines as the stages of
phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tilelang_core import ir
from tilescale.backends.tilelang.lowering import implemented, split_grid, stages
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.backends.tilelang.lowering.call_barriers import CallBarriers, needed, small_grid
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.lowering.phase import LoweringTarget, Phase
from tilescale.backends.tilelang.lowering.plan import plan
from tilescale.program.extents import inside_expressions
from tilescale.program.model import Control, GridPhase, Launch, Part, Program, Sequence


@dataclass(frozen=True)
class LoweredGrid(GridPhase):
    """A grid phase of a launch, and its kernel."""

    launch: Launch
    kernel: LoweredKernel


@dataclass(frozen=True)
class ConcurrentGrids(GridPhase):
    """A grid phase whose programs were split into several concurrent grids."""

    grids: tuple[LoweredGrid, ...]


@dataclass(frozen=True)
class LoweredProgram:
    """A program for a target.

    Attributes:
        body: its tree of parts, launches with their bodies.
        rendezvous: the barriers of all devices in a call.
        sites: the waits and signals of grids, by number.
        notes: the chosen implementation of each operation between units, with the reason.
    """

    program: Program
    target: LoweringTarget
    body: Part
    rendezvous: CallBarriers
    sites: tuple[WaitSite, ...]
    notes: tuple[str, ...]

    @property
    def grids(self) -> tuple[LoweredGrid, ...]:
        """The grids of the program, in order, including those of its device phases."""
        return tuple(part for part in _leaves(self.body) if isinstance(part, LoweredGrid))

    @property
    def host_steps(self) -> tuple[HostStep, ...]:
        """The operations of the host, in order."""
        return tuple(part for part in _leaves(self.body) if isinstance(part, HostStep))


def lower(program: Program, target: LoweringTarget) -> LoweredProgram:
    """A program for a target. Raises UnsupportedError: a construct without a lowering, with its line."""
    implemented.check(program, target)
    body, planned = plan(program, target)
    rendezvous = needed(program, body, target)
    within = small_grid(program, body, target) if rendezvous.entry or rendezvous.exit else None
    rendezvous = replace(rendezvous, inside=within is not None)
    lowering = _Lowering(program, target, rendezvous, within)
    lowered = lowering.part(body, None, ())
    notes = tuple(dict.fromkeys([*planned, *lowering.notes]))
    return LoweredProgram(program, target, lowered, rendezvous, tuple(lowering.sites), notes)


@dataclass
class _Lowering:
    program: Program
    target: LoweringTarget
    rendezvous: CallBarriers
    within: GridPhase | None
    sites: list[WaitSite] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    grids: int = 0

    def part(self, part: Part, launch: Launch | None, around: tuple[ir.Var, ...]) -> Part:
        """One part, with its launch and the variables of enclosing loops."""
        if isinstance(part, Launch):
            return replace(part, body=self.part(part.body, part, around))
        if isinstance(part, Sequence):
            return Sequence(tuple(self.part(p, launch, around) for p in part.parts))
        if isinstance(part, Control):
            inside = (*around, part.stmt.loop_var) if isinstance(part.stmt, ir.For) else around
            return replace(part, parts=tuple(self.part(p, launch, inside) for p in part.parts))
        if not isinstance(part, GridPhase):
            return part
        assert launch is not None, "a grid is a launch's"
        return self._grids(part, launch, around)

    def _grids(self, phase: GridPhase, launch: Launch, around: tuple[ir.Var, ...]) -> LoweredGrid | ConcurrentGrids:
        found = [(phase, launch)]
        if phase is not self.within:
            found = split_grid.apart(phase, launch, self.program, self.target.machine)
        made = tuple(self._grid(*one, around) for one in found)
        # The plan has notes for the parts of a device phase.
        if any(launch.grid is own.grid for own in self.program.launches):
            self.notes += [note for grid in made for note in grid.kernel.notes]
            self.notes += [split_grid.NOTE] if len(made) > 1 else []
        return made[0] if len(made) == 1 else ConcurrentGrids(phase.stmt, made)

    def _grid(self, phase: GridPhase, launch: Launch, around: tuple[ir.Var, ...]) -> LoweredGrid:
        inside = (*around, *inside_expressions(self.program))
        number, first = self.grids, len(self.sites)
        made = Phase(self.program, launch, self.target, number, phase.stmt, first_site=first, around=inside)
        kernel = stages.lower(made, self.rendezvous if phase is self.within else None)
        self.grids += 1
        self.sites += kernel.sites
        return LoweredGrid(phase.stmt, launch, kernel)


def _leaves(part: Part) -> Iterator[Part]:
    """Grids and host steps, in order."""
    if isinstance(part, Launch):
        yield from _leaves(part.body)
    elif isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _leaves(inner)
    elif isinstance(part, ConcurrentGrids):
        yield from part.grids
    else:
        yield part
