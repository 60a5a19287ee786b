# SPDX-License-Identifier: MIT
"""The phases of a program that become tasks of one launch: grids, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.loop_tiles import ITERATIONS
from tilescale.errors import Location
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.legality import synchronizes_programs
from tilescale.passes.overlap.tile_order import check_order
from tilescale.passes.persistent.collectives import tiles_of
from tilescale.program.effects import ProgramNames, names_of
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program, location
from tilescale.program.operations import Collective, TileView, operation


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop around phases that stays a loop of the launch. `values`: numbers that each iteration computes."""

    var: ir.Var
    begin: int
    count: int
    values: list[ir.Bind] = field(default_factory=list)

    @property
    def index(self) -> Any:
        """The number of the iteration."""
        return self.var - self.begin if self.begin else self.var

    def around(self, stmts: Sequence[ir.Stmt]) -> ir.For:
        """The loop with some statements behind its values."""
        body = tir.sequence([*self.values, *stmts])
        return ir.For(self.var, self.begin, self.count, ir.ForKind.SERIAL, body, annotations={ITERATIONS: 1})


@dataclass(frozen=True)
class Grid:
    """A phase: the program of one task, for a grid of tasks.

    Attributes:
        title: a name for reports.
        loop: the loop around the phase, if there is one.
    """

    phase: GridPhase
    launch: Launch
    title: str
    where: Location | None
    loop: Loop | None = None

    def indices(self, task: Any) -> dict[ir.Var, ir.PrimExpr]:
        """The indices of the grid from the number of a task: its first axis runs fastest."""
        *faster, last = zip(self.launch.programs, self.launch.grid, strict=True)
        found: dict[ir.Var, ir.PrimExpr] = {}
        for var, extent in faster:
            found[var], task = task % extent, task // extent
        return {**found, last[0]: task}


@dataclass(frozen=True)
class Phases:
    """A program as the phases of one launch. `shared`: values of a device that all phases use."""

    grids: tuple[Grid, ...]
    shared: tuple[ir.Stmt, ...]
    names: ProgramNames


def phases_of(program: Program, machine: Machine) -> Phases:
    """The phases of a program. Raises Declined: it cannot be fused."""
    found = _Finder(machine, names_of(program))
    found.part(program.body, None)
    _check_alike([grid.launch for grid in found.grids])
    return Phases(tuple(found.grids), tuple(found.shared), found.names)


class _Finder:
    def __init__(self, machine: Machine, names: ProgramNames):
        self.machine, self.names = machine, names
        self.grids: list[Grid] = []
        self.shared: list[ir.Stmt] = []
        self.loop: Loop | None = None

    def part(self, part: Part, launch: Launch | None) -> None:
        if isinstance(part, Launch):
            self.part(part.body, part)
        elif isinstance(part, GridPhase):
            assert launch is not None
            self._grid(part, launch)
        elif isinstance(part, DevicePhase):
            for stmt in ir.in_order(part.stmt):
                self._device(stmt, launch)
        elif isinstance(part, Control):
            self._control(part, launch)
        else:
            for inner in part.parts:
                self.part(inner, launch)

    def _control(self, control: Control, launch: Launch | None) -> None:
        loop = control.stmt
        bounds = ir.constants([loop.min, loop.extent]) if isinstance(loop, ir.For) else None
        if bounds is None or self.loop is not None:
            raise Declined("a loop or branch around phases", location(loop))
        self.loop = Loop(loop.loop_var, begin=bounds[0], count=bounds[1])
        for part in control.parts:
            self.part(part, launch)
        self.loop = None

    def _grid(self, phase: GridPhase, launch: Launch) -> None:
        phase = GridPhase(_without_block_order(phase.stmt))
        if all(isinstance(stmt, ir.Bind) for stmt in ir.in_order(phase.stmt)):
            return
        check_order(phase, launch, self.machine)
        for stmt in ir.statements(phase.stmt):
            self._check_unordered(stmt)
        extents = " x ".join(map(str, launch.grid))
        self.grids.append(Grid(phase, launch, f"grid {extents}", launch.where, self.loop))

    def _check_unordered(self, stmt: ir.Stmt) -> None:
        """Raise Declined if a statement of a grid orders units, but for blocks of one number on all devices."""
        effects = self.names.effects(stmt)
        if effects.opaque:
            raise Declined("an external function may order units", location(stmt))
        apart = any(access.at is not None for access in effects.accesses)
        together = synchronizes_programs(effects, self.machine) and not self._is_of_devices(stmt)
        if effects.flags or apart or together:
            raise Declined("the program orders its units by itself", location(stmt))

    def _is_of_devices(self, stmt: ir.Stmt) -> bool:
        """Whether a statement is a collective of blocks of one number on all devices."""
        made = operation(stmt.value) if isinstance(stmt, ir.Evaluate) else None
        return isinstance(made, Collective) and self.machine.level(made.level).kind == "unit"

    def _device(self, stmt: ir.Stmt, launch: Launch | None) -> None:
        """A statement that a device executes."""
        if tir.is_nothing(stmt):
            return
        if isinstance(stmt, ir.Bind) and not self.names.effects(stmt).accesses:
            self._value(stmt)
            return
        if launch is None or not self._is_of_devices(stmt):
            raise Declined("a statement of the device between grids", location(stmt))
        made = Collective.of(stmt.value)
        phase, tiled = tiles_of(made, stmt, launch, self.machine.program_units)
        self.grids.append(Grid(phase, tiled, f"{made.name} of {_name(made.source)}", location(stmt), self.loop))

    def _value(self, stmt: ir.Bind) -> None:
        """A value of a device; one that differs between iterations belongs to its loop."""
        loop = self.loop
        varies = loop is not None and {loop.var, *(value.var for value in loop.values)} & set(ir.uses(stmt))
        if loop is not None and varies and isinstance(operation(stmt.value), TileView):
            raise Declined("a view that differs between iterations of a loop", location(stmt))
        (loop.values if loop is not None and varies else self.shared).append(stmt)


def _check_alike(launches: Sequence[Launch]) -> None:
    """Raise Declined if launches cannot share their blocks."""
    if not launches:
        raise Declined("no grid computes anything")
    first = launches[0]
    for launch in launches:
        if launch.cluster_size > 1:
            raise Declined("programs of a cluster stay together", launch.where)
        if launch.barriers:
            raise Declined("barriers in shared memory are of one launch", launch.where)
        if any(ir.constant(extent) is None for extent in (*launch.grid, *(n for _, n in launch.extents))):
            raise Declined("the extent of a grid is known at launch only", launch.where)
        if launch.threads != first.threads:
            raise Declined(f"grids of {first.thread_count} and of {launch.thread_count} threads", launch.where)
    _check_names(launches)


def _check_names(launches: Sequence[Launch]) -> None:
    """Raise Declined if two workspaces have one name, by which a launch finds its memory."""
    known: dict[str, ir.Var] = {}
    for launch in launches:
        for buffer in launch.buffers:
            if buffer.scope() == "global" and not known.setdefault(buffer.name, buffer.data).same_as(buffer.data):
                raise Declined(f"two workspaces are named {buffer.name!r}", launch.where)


def _without_block_order(stmt: ir.Stmt) -> ir.Stmt:
    """A phase whose blocks have their indices in order: tasks are placed anyway."""

    def leave(node: ir.Node) -> Any:
        return node.body if isinstance(node, ir.AttrStmt) and str(node.attr_key) == tir.BLOCK_ORDER else None

    return tir.rewrite(stmt, leave=leave)


def _name(region: ir.Call) -> str:
    return str(ir.region_parts(region)[0].name).removesuffix("_view")
