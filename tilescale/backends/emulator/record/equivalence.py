# SPDX-License-Identifier: MIT
"""Program equivalence in runs without data: one program is run and recorded, equivalent ones reuse its record.

Without data a program consists of its demands on the machine. Where programs neither order nor address each other, two
of them have equal demands, unless their indices decide more than the addresses of their tiles: a branch, the extent of
a loop. Effects of an address are evaluated for each program: the part of a tile inside its tensor, and cache hits. A
tensor-owning unit in the same state as another one before a grid reuses the record of the whole grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilescale.backends.emulator.execute.grid import Grid
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.record.registry import orders
from tilescale.program.model import Launch
from tilescale.program.operations import Barrier, Collective, Copy, Rank, Signal, TileView, operation, signalled
from tilescale.program.ops import SCALE
from tilescale.timing.rates import TileCache
from tilescale.timing.record import CacheLookup
from tilescale.timing.steps import RecordedTask

Index = tuple[int, ...]

OF_ONE_PROGRAM = frozenset(
    (
        tl.PTX_WAIT_GROUP, tl.WAIT_TMA_STORES, tl.STORAGE_SYNC, tl.WAIT_BARRIER_PARITY,
        tl.ARRIVE_BARRIER, tl.PTX_ARRIVE_BARRIER_EXPECT_TX, tl.PTX_WAIT_BARRIER,
        tl.PTX_CP_ASYNC_BARRIER_NOINC, tl.NAMED_BARRIER_ARRIVE, tl.TCGEN05_MMA_ARRIVE,
    )
)  # fmt: skip
"""Operations that order only the threads of a program."""


@dataclass(frozen=True)
class Equivalence:
    """The differences between programs of a grid phase, and between grids of it.

    Attributes:
        deciding: axes of the grid on whose index the steps of a program depend.
        bindings: slots of variables that are computed from the programs' indices, and their closures, in order.
        around: slots of values from before the phase.
        by_rank: whether its programs depend on the rank of their tensor-owning unit.
    """

    deciding: tuple[int, ...]
    bindings: tuple[tuple[int, Closure], ...]
    around: tuple[int, ...]
    by_rank: bool


def equivalence(compiler: Compiler, launch: Launch, stmt: ir.Stmt) -> Equivalence | None:
    """The differences between programs of a phase; None where they synchronize with others, or where there is data.
    `stmt`: the compiled phase."""
    machine = compiler.machine
    if compiler.data or compiler.preempts or launch.cluster_size > 1 or machine.program_level == machine.tensor_level:
        return None
    if ir.contains(stmt, lambda node: _reaches_out(compiler, node)):
        return None
    survey = _Survey(compiler, launch)
    survey.statement(stmt)
    return Equivalence(
        tuple(axis for axis, var in enumerate(launch.programs) if var in survey.deciding),
        tuple((compiler.slot(var), compiler.bindings[var]) for var in survey.bound if var in compiler.bindings),
        tuple(sorted(map(compiler.slot, _around(compiler, launch, stmt)))),
        ir.contains(stmt, lambda node: _rank_of(compiler, node) == "unit"),
    )


def _rank_of(compiler: Compiler, node: ir.Node) -> str | None:
    """The kind of level whose ranks a node reads."""
    rank = operation(node)
    return compiler.machine.level(rank.level).kind if isinstance(rank, Rank) else None


def _reaches_out(compiler: Compiler, node: ir.Node) -> bool:
    """Whether a node may synchronize with other programs, or access their memory."""
    if isinstance(node, ir.While) or compiler.reaches_flags(node):
        return True
    if isinstance(node, ir.AttrStmt) and str(node.attr_key) == SCALE:
        return compiler.machine.level(str(node.value.value)).kind == "cluster"
    name, ours = ir.op_name(node), operation(node)
    if isinstance(ours, Copy | Barrier | Collective):
        return bool(signalled(ours)) or compiler.machine.level(ours.level).kind != "thread_group"
    return isinstance(ours, Signal) or (orders(name) and name not in OF_ONE_PROGRAM)


class _Survey:
    """Follows the programs' indices through the statements of a phase.

    Attributes:
        deciding: indices that decide more than the addresses of tiles.
        bound: variables computed from some of them, in order, which can be computed again.
    """

    def __init__(self, compiler: Compiler, launch: Launch):
        self._compiler, self._launch = compiler, launch
        self._from: dict[ir.Var, set[ir.Var]] = {var: {var} for var in launch.programs}
        self.deciding: set[ir.Var] = set()
        self.bound: list[ir.Var] = []
        self._ranks: dict[ir.Var, set[ir.Var]] = {}

    def statement(self, stmt: ir.Stmt) -> None:
        if isinstance(stmt, ir.Bind):
            self._bind(stmt)
        elif isinstance(stmt, ir.BufferStore):
            if stmt.buffer.scope() in PRIVATE:
                self._decides(stmt.value, *stmt.indices)
        elif isinstance(stmt, ir.Evaluate):
            self._operation(stmt.value)
        elif isinstance(stmt, ir.For):
            self._decides(stmt.min, stmt.extent)
            if stmt.kind == ir.ForKind.PARALLEL and not ir.contains(stmt, _stores_privately):
                return  # counted as a whole, for any value of its conditions
        elif isinstance(stmt, ir.IfThenElse):
            self._decides(stmt.condition)
        for part in ir.children(stmt):
            self.statement(part)

    def _bind(self, stmt: ir.Bind) -> None:
        found = self._sources(stmt.value)
        if ir.contains(stmt.value, lambda node: _rank_of(self._compiler, node) in ("program", "cluster")):
            self._from[stmt.var] = self._ranks[stmt.var] = set(self._launch.programs)
        elif found and ir.contains(stmt.value, lambda node: isinstance(operation(node), TileView | Rank)):
            self.deciding |= found
        elif found:
            self._from[stmt.var] = found
            self.bound.append(stmt.var)
            self._follow_ranks(stmt.value)

    def _follow_ranks(self, *expressions: ir.PrimExpr) -> None:
        """Ranks are not computed again for another program: where anything depends on a rank, it is deciding."""
        for expression in expressions:
            for var in ir.variables(expression):
                self.deciding |= self._ranks.get(var, set())

    def _operation(self, call: ir.PrimExpr) -> None:
        for arg in call.args if isinstance(call, ir.Call) else [call]:
            is_tile = ir.op_name(arg) == tl.REGION or isinstance(arg, ir.BufferLoad)
            if is_tile and ir.region_parts(arg)[0].scope() == "global":
                _, begins, extents = ir.region_parts(arg)
                self._follow_ranks(*begins)
                self._decides(*extents)
            else:
                self._decides(arg)

    def _decides(self, *expressions: ir.PrimExpr) -> None:
        for expression in expressions:
            self.deciding |= self._sources(expression)

    def _sources(self, expression: Any) -> set[ir.Var]:
        found: set[ir.Var] = set()
        for var in ir.variables(expression):
            found |= self._from.get(var, set())
        return found


def _stores_privately(node: ir.Node) -> bool:
    return isinstance(node, ir.BufferStore) and node.buffer.scope() in PRIVATE


def _around(compiler: Compiler, launch: Launch, stmt: ir.Stmt) -> set[ir.Var]:
    """Variables, and data of buffers, that a phase uses and does not bind."""
    used: set[ir.Var] = set()
    bound = {*launch.programs, *(var for var, _ in launch.thread_vars)}

    def visit(node: ir.Node) -> None:
        if isinstance(node, ir.Var):
            used.add(node)
            used.update(ir.variables(compiler.deferred.get(node)))
        elif isinstance(node, ir.For):
            bound.add(node.loop_var)
        elif isinstance(node, ir.Bind):
            bound.add(node.var)
        if hasattr(node, "buffer"):
            used.add(node.buffer.data)
            for extent in node.buffer.shape:
                used.update(ir.variables(extent))

    ir.walk(stmt, visit)
    return used - bound


# -- representatives ---------------------------------------------------------------------------------------------------


@dataclass
class Representative:
    """A program, or a whole grid, that is run for all that are equivalent to it.

    Attributes:
        tasks: its record; None until its end.
        collectives: those that its programs took part in.
        cache: the cache's content after a grid.
    """

    tasks: list[RecordedTask] | None = None
    collectives: Counter[str] = field(default_factory=Counter)
    cache: TileCache | None = None


class Representatives:
    """The representatives of a phase: for each grid of it, and for the programs of the grid that is run."""

    def __init__(self, equivalence: Equivalence, recorder: Recorder):
        self.equivalence, self.recorder = equivalence, recorder
        self._known: dict[Hashable, Representative] = {}

    def run(self, grid: Grid) -> None:
        run, recorder, key = grid.device.run, self.recorder, self._key(grid)
        known = self._known.get(key)
        if known is not None:
            run.scheduler.block(Wait(lambda: known.tasks is not None, "a unit that does the same", quiet=True))
            assert known.tasks is not None
            recorder.takes_over(known.tasks, known.cache)
            run.programs_ended(grid.device.unit, grid.count, known.collectives)
            return
        mine = Representative()
        if key is not None:
            self._known[key] = mine
        mine.collectives, cache = GridPrograms(self, grid).run(), recorder.current_cache()
        mine.tasks, mine.cache = recorder.launched.tasks, cache and cache.copy()

    def _key(self, grid: Grid) -> Hashable:
        """The state that a grid's record follows from; None where it is unknown."""
        device = grid.device
        found = [device.slots[slot] for slot in self.equivalence.around]
        values = tuple((v.shape, str(v.dtype)) if isinstance(v, np.ndarray) else v for v in found)
        if not all(v is None or isinstance(v, tuple | int | float | np.generic) for v in values):
            return None
        rank = device.run.number(device.unit) if self.equivalence.by_rank else None
        cache = self.recorder.current_cache()
        return grid.shape, values, rank, cache.history if cache is not None else None


class GridPrograms:
    """The programs of one grid."""

    def __init__(self, all_grids: Representatives, grid: Grid):
        self._equivalence, self._recorder, self._grid = all_grids.equivalence, all_grids.recorder, grid
        # Deciding indices -> the tile accesses to check; these with their results -> the program that is run.
        self._lookups: dict[Index, list[CacheLookup]] = {}
        self._known: dict[Hashable, Representative] = {}

    def run(self) -> Counter[str]:
        """Record all of them, in start order and at their points in the cache's history; returns their collectives."""
        grid, run = self._grid, self._grid.device.run
        before = run.collectives_of(grid.device.unit)
        self._recorder.starts(grid.places)
        for number, (index,) in enumerate(grid.clusters):
            self._record(number, index)
            if number + grid.plan.resident < grid.count:
                self._recorder.starts(1)
        return run.collectives_of(grid.device.unit) - before

    def _record(self, number: int, index: Index) -> None:
        kind = tuple(index[axis] for axis in self._equivalence.deciding)
        lookups = self._lookups.get(kind)
        found = None if lookups is None else tuple([self._found(lookup, index) for lookup in lookups])
        known, run, unit = self._known.get((kind, found)), self._grid.device.run, self._grid.device.unit
        if known is not None and known.tasks is not None:
            self._recorder.repeats(self._grid.label(index), *known.tasks)
            run.programs_ended(unit, 1, known.collectives)
            return
        before, looks = run.collectives_of(unit), list[CacheLookup]()
        task = self._run(number, index, found, looks)
        self._lookups.setdefault(kind, looks)
        collectives = run.collectives_of(unit) - before
        self._known[kind, tuple(look.found for look in looks)] = Representative([task], collectives)

    def _found(self, lookup: CacheLookup, index: Index) -> tuple[bool, int]:
        """The cache and bounds results of a program for an access of a recorded one."""
        frame = lookup.frame
        for slot, value in zip(self._grid.plan.slots, index, strict=True):
            frame.slots[slot] = value
        for slot, closure in self._equivalence.bindings:
            if frame.slots[slot] is not None:
                frame.slots[slot] = closure(frame)
        tile, nbytes = lookup.tile(frame)
        return self._recorder.in_cache(tile, nbytes * lookup.times), nbytes

    def _run(
        self, number: int, index: Index, found: tuple[tuple[bool, int], ...] | None, looks: list[CacheLookup]
    ) -> RecordedTask:
        """Run a program to its end; `found` are the cache's answers so far. Returns its record, and all its `looks`."""
        ended: list[Task] = []
        task = self._grid.start(number, [index], lambda: ended.append(task))[0]
        log = self._recorder.log_of(task)
        log.looks, log.answers = looks, iter([held for held, _ in found]) if found is not None else None
        self._grid.device.run.scheduler.block(Wait(lambda: bool(ended), "its program", quiet=True))
        return log.task
