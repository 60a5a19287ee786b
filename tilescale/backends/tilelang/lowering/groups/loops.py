# SPDX-License-Identifier: MIT
"""Find the pipelined loops whose loads a producer warpgroup can issue ahead of the units that consume the tiles.

Why: such a loader runs concurrently with the rest of the program, so its loads may only be ordered by synchronization
that it takes part in: the tiles themselves, waits in the loop, which it makes itself (gates.py), and the units' signal
on arrival at a loop whose loads depend on earlier statements. Before: a phase. After: its loops split into the loader's
steps and statements of units (pipelines.py lowers them). Nothing is rewritten.

Declines, each with its reason in a note: launches without threads or registers for a loader, loops of a single unit,
loops of varying trip count, tiles that have another use, sources that the program writes (for loads from peers: in the
loop), copies other than bulk copies, waits after the units' work in an iteration or of units themselves for loaded
data, waits for flags that the program may change before it reaches them, and loops inside which programs of a cluster
synchronize, which takes all threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from tilelang_core import ir, tl
from tilescale.backends.tilelang.lowering.clusters.dsmem import is_barrier
from tilescale.backends.tilelang.lowering.groups.distribution import accesses
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.backends.tilelang.lowering.groups.threads import ThreadNames
from tilescale.backends.tilelang.lowering.groups.unit import threads_of
from tilescale.backends.tilelang.lowering.role_graph.gates import (
    GatedStep,
    LoadGates,
    flag_of,
    in_first_iteration,
    is_lasting,
    waits_in,
    waits_of,
)
from tilescale.backends.tilelang.lowering.role_graph.loads import ProducerLoad
from tilescale.backends.tilelang.lowering.statements import is_load, is_pipelined, is_pull, is_region, is_wait
from tilescale.backends.tilelang.ptx import WARPGROUP, most_threads
from tilescale.hda import Level
from tilescale.passes.declined import Declined
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.dependence import Dependence
from tilescale.program.effects import Effects
from tilescale.program.footprint import stages_of

EnclosingLoops: TypeAlias = "tuple[ir.For | ir.PrimExpr, ...]"
"""Serial loops, and conditions that hold, outermost first."""


@dataclass(frozen=True)
class PipelinedLoop:
    """A pipelined loop, split into roles.

    Attributes:
        level: the level of the units that work in it.
        around: the enclosing loops and conditions; no condition in a loop, and each of these loops has no other one
            with a loader.
        steps: the loader's part of an iteration: loads, and waits before the loads that they order.
        released: whether units must signal the loader on arrival at the loop.
        moved: waits in front of it that are among its `steps` now.
        binds: the names that `steps`, `around` and extents use, bound before the loop or in it (`inner`).
        rest: the statements of units.
    """

    stmt: ir.For
    level: Level
    around: EnclosingLoops
    steps: tuple[GatedStep, ...]
    released: bool
    moved: tuple[ir.Stmt, ...]
    binds: tuple[ir.Bind, ...]
    inner: tuple[ir.Bind, ...]
    rest: tuple[ir.Stmt, ...]

    @property
    def loads(self) -> list[ProducerLoad]:
        """Its copies from memory, of this device or of peers, into tiles."""
        return [step for step in self.steps if isinstance(step, ProducerLoad)]

    @property
    def gates(self) -> list[ir.Stmt]:
        """Its waits."""
        return [step for step in self.steps if isinstance(step, ir.Stmt)]

    @property
    def free(self) -> list[ProducerLoad]:
        """The loads in front of its first wait, which nothing orders but tiles, unless the loop is released."""
        return [*itertools.takewhile(lambda step: isinstance(step, ProducerLoad), self.steps)]

    @property
    def waits(self) -> list[ir.Call]:
        """The calls in them."""
        return waits_of(self.steps)

    @property
    def tiles(self) -> list[ir.Buffer]:
        return [load.tile for load in self.loads]

    @property
    def stages(self) -> int:
        """Tiles of a kind that there are."""
        return stages_of(self.stmt)

    @property
    def iteration(self) -> Any:
        """Number of earlier executions, in terms of the enclosing loops; 0 without any."""
        number: Any = ir.int_node(0)
        for outer in loops_of(self.around):
            number = number * outer.extent + (outer.loop_var - outer.min)
        return number


def asynchronous(stage: GroupStage) -> list[PipelinedLoop]:
    """The loops of a phase that can have a loader, in order."""
    return _LoopSearch(stage).found


class _LoopSearch:
    def __init__(self, stage: GroupStage):
        self.stage, self.phase = stage, stage.phase.stmt
        self.found: list[PipelinedLoop] = []
        self._before: list[ir.Call] = []  # waits, barriers and collectives passed so far
        self._has_met_cluster = False
        if any(stage.level_of(stmt) is not None for stmt in ir.statements(self.phase)):
            self._walk(self.phase, [], ())

    def _walk(
        self, stmt: ir.Stmt, binds: list[ir.Bind], around: EnclosingLoops, leading: Sequence[ir.Stmt] = ()
    ) -> None:
        """Visit loops that all threads of a program reach together; `leading` are the statements before in a list."""
        if isinstance(stmt, ir.SeqStmt):
            for number, inner in enumerate(stmt.seq):
                self._walk(inner, binds, around, stmt.seq[:number])
        elif isinstance(stmt, ir.AttrStmt) and self.stage.level_of(stmt) is None:
            self._walk(stmt.body, binds, around)
        elif isinstance(stmt, ir.IfThenElse) and not is_wait(stmt):
            before = len(self._before)
            self._walk(stmt.then_case, binds, (*around, stmt.condition))
            if stmt.else_case is not None:
                passed, self._before = self._before[before:], self._before[:before]
                self._walk(stmt.else_case, binds, (*around, ir.Not(stmt.condition)))
                self._before += passed
        elif isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.SERIAL and not is_pipelined(stmt):
            self._walk(stmt.body, binds, (*around, stmt))
        else:
            if isinstance(stmt, ir.Bind):
                binds.append(stmt)
            for loop in filter(is_pipelined, ir.statements(stmt)):
                self._loop(loop, binds, around, leading if loop is stmt else None)
            self._before += self._waits_for_others(stmt)
            self._has_met_cluster |= ir.contains(stmt, is_barrier)

    def _loop(
        self, stmt: ir.For, binds: list[ir.Bind], around: EnclosingLoops, leading: Sequence[ir.Stmt] | None
    ) -> None:
        """A loop of a program that has units; nothing leads to one to which they do not come together."""
        try:
            if leading is None:
                raise Declined("it is a loop of one unit, or stands in one that is not serial")
            self._check_room(around)
            self.found.append(self._taken_apart(stmt, binds, around, leading))
        except Declined as reason:
            self.stage.notes.append(f"T.Pipelined over {stmt.loop_var.name} without a loader: {reason}")

    def _check_room(self, around: EnclosingLoops) -> None:
        launch, machine = self.stage.launch, self.stage.target.machine
        threads = launch.thread_count
        if not machine.has("tma"):
            raise Declined(f"{machine.name} has no bulk copies")
        if self._has_met_cluster or any(ir.contains(loop, is_barrier) for loop in loops_of(around)):
            raise Declined("programs of a cluster synchronize in front of it, for which all threads have to come")
        if threads % WARPGROUP or threads + WARPGROUP > most_threads(machine):
            raise Declined(f"a warpgroup that loads does not fit next to {threads} threads")

    def _waits_for_others(self, stmt: ir.Stmt) -> list[ir.Call]:
        """The first wait for other programs or devices in a statement."""
        found: list[ir.Call] = []

        def visit(node: Any) -> None:
            if ir.op_name(node) in ops.COLLECTIVES | {ops.WAIT.name, ops.BARRIER.name}:
                level = ir.attribute(node, "level")
                if level is None or self.stage.level(str(level)).kind != "thread_group":
                    found.append(node)

        ir.walk(stmt, visit)
        return found

    # -- one loop ------------------------------------------------------------------------------------------------------

    def _taken_apart(
        self, stmt: ir.For, binds: list[ir.Bind], around: EnclosingLoops, leading: Sequence[ir.Stmt]
    ) -> PipelinedLoop:
        if set(stmt.annotations) != {tl.STAGES}:
            raise Declined("it has a schedule of its own")
        body = self._statements(stmt.body)
        made = [(self._load(inner), inner) for inner in body]
        steps = [load or inner for load, inner in made if load is not None or is_wait(inner)]
        rest = [inner for load, inner in made if load is None and not is_wait(inner)]
        if not any(isinstance(step, ProducerLoad) for step in steps):
            raise Declined("it loads no whole tile in bulk")
        inner = [bind for bind in rest if isinstance(bind, ir.Bind)]
        level = self._level([s for s in rest if not isinstance(s, ir.Bind)])
        self._check_waits(body, LoadGates(self._order, steps))
        moved = self._moved(stmt, leading, LoadGates(self._order, steps))
        gates = LoadGates(self._order, [*(in_first_iteration(stmt, wait) for wait in moved), *steps])
        asked = [expr for node in (*around, stmt, *steps) for expr in expressions(node)]
        used = used_binds([*binds, *inner], asked)
        self._check_foreseen(stmt, around, used, asked)
        released = self._is_released(gates, stmt, around)
        own = tuple(bind for bind in inner if bind in used)
        loop = PipelinedLoop(
            stmt, level, around, gates.ordered(), released, tuple(moved), tuple(used), own, tuple(rest)
        )
        self._check_alone(loop)
        self._before = [call for call in self._before if not any(call.same_as(wait) for wait in loop.waits)]
        return loop

    def _load(self, stmt: ir.Stmt) -> ProducerLoad | None:
        load = ProducerLoad.of(stmt, self.stage.phase)
        return load if load is not None and load.is_bulk(self.stage.phase) else None

    def _statements(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        """The statements of a list in order, also of regions that units around the program execute."""
        if isinstance(stmt, ir.SeqStmt):
            return [part for inner in stmt.seq for part in self._statements(inner)]
        if is_region(stmt) and self.stage.level_of(stmt) is None:
            return self._statements(stmt.body)
        return [stmt]

    def _level(self, stmts: list[ir.Stmt]) -> Level:
        """The level whose units execute all of some statements."""
        levels = [self.stage.level_of(stmt) for stmt in stmts]
        level = next((level for level in levels if level is not None), None)
        if level is None or None in levels:
            by_all = next((stmt for stmt, by in zip(stmts, levels, strict=True) if by is None), None)
            is_copy = by_all is not None and (is_load(by_all) or is_pull(by_all))
            what = "a copy in it is none in bulk" if is_copy else "the program itself works in it"
            where = location(by_all) if by_all is not None else None
            raise Declined(what + (f" (line {where.line})" if where is not None else ""))
        if any(other != level for other in levels) or threads_of(level) % WARPGROUP:
            raise Declined("its units are no warpgroups, or of several levels")
        return level

    def _check_waits(self, body: list[ir.Stmt], gates: LoadGates) -> None:
        """Check that the producer can make the waits in a loop. Raises Declined if it cannot."""
        works = [self.stage.level_of(inner) is not None for inner in body]
        first = works.index(True) if True in works else len(works)
        if any(is_wait(inner) for inner in body[first:]):
            raise Declined("it waits after statements of units")
        if gates.wait_for(call for inner in body if not is_wait(inner) for call in self._waits_for_others(inner)):
            raise Declined("units wait inside it for its loads")
        if not all(is_lasting(self._order, wait, self._effects) for wait in gates.waits):
            raise Declined("the program changes a flag for which it waits in it, and the wait would come too early")

    def _moved(self, stmt: ir.For, leading: Sequence[ir.Stmt], gates: LoadGates) -> list[ir.Stmt]:
        """Waits directly before a loop that order its loads. The first iteration can execute them instead."""
        found: list[ir.Stmt] = []
        if not ir.proves(ir.GE(stmt.extent, 1), {}):
            return found
        for before in reversed(leading):
            calls, effects = waits_in(before), self._order.names.all_effects(before)
            if is_wait(before) and all(is_lasting(self._order, call, self._effects) for call in calls):
                found = [before, *found] if gates.wait_for(calls) else found
            elif effects.orders or any(self._order.names.shared(access.root) for access in effects.accesses):
                break
        return found

    def _is_released(self, gates: LoadGates, stmt: ir.For, around: EnclosingLoops) -> bool:
        """Whether its loads must stay after earlier statements, in earlier iterations of enclosing loops too."""
        again = [call for outer in loops_of(around)[:1] for call in self._waits_for_others(outer)]
        own = [*self._waits_for_others(stmt), *gates.waits]
        others = [call for call in (*self._before, *again) if not any(call.same_as(mine) for mine in own)]
        # A load from a peer may be a local one, which the program has written in order.
        released = gates.wait_for(others) or bool(self._far(gates.steps) & _written(self._effects))
        if released and loops_of(around) and not ir.proves(ir.GE(stmt.extent, 1), {}):
            raise Declined("its trip count may be 0 in an iteration of the enclosing loop, which waits for its loads")
        return released

    def _check_foreseen(self, stmt: ir.For, around: EnclosingLoops, binds: list[ir.Bind], asked: list[Any]) -> None:
        """The loader knows, as all threads do, how often a loop has been run through and which way the program goes."""
        threads = ThreadNames(self.stage.launch)
        for bind in binds:
            threads.note(bind)
        if any(threads.is_divergent(expr) for expr in asked):
            raise Declined("the addresses of its loads depend on the thread")
        outer = loops_of(around)
        if any(ir.contains(loop, lambda node: ir.op_name(node) in tl.LEAVE_LOOP) for loop in outer):
            raise Declined("the loop around it may be left")
        if outer and not isinstance(around[-len(outer)], ir.For):
            raise Declined("it stands under a condition in a loop")
        variables = {loop.loop_var for loop in outer}
        extents = [stmt.extent, *(loop.extent for loop in outer)]
        spelled = [*extents, *(bind.value for bind in used_binds(binds, extents))]
        if any(ir.variables(expr) & variables for expr in spelled):
            raise Declined("its length changes from iteration to iteration of the loop around it")
        if outer and sum(map(is_pipelined, ir.statements(outer[0]))) > 1:
            raise Declined("the loop around it has several such loops")

    @cached_property
    def _order(self) -> Dependence:
        return Dependence(self.stage.program, self.stage.target.machine)

    @cached_property
    def _effects(self) -> Effects:
        return self._order.names.all_effects(self.phase)

    def _check_alone(self, loop: PipelinedLoop) -> None:
        """Nothing but its loads writes the tiles or their sources, and nothing outside names the tiles."""
        tiles = {tile.data for tile in loop.tiles}
        noted = any(isinstance(note, dict) and tiles & set(note) for _, note in self.stage.launch.notes)
        held = any(self.stage.distributions.of(tile) or self.stage.owner(tile) for tile in loop.tiles)
        if len(tiles) < len(loop.loads) or noted or held:
            raise Declined("a tile that it loads is loaded twice, held by units, or has a layout of its own")
        inside = [*self._named(loop.stmt)]
        everywhere = [*self._named(self.phase)]
        outside = sum(data in tiles for data, _ in everywhere) - sum(data in tiles for data, _ in inside)
        if outside or ir.contains(self.phase, _is_pointer):
            raise Declined("a tile that it loads is used outside it too")
        if sum(data in tiles and writes for data, writes in everywhere) > len(tiles):
            raise Declined("the program writes a tile that it loads")
        flags = {self.stage.distributions.base(flag) for flag in map(flag_of, loop.waits)}
        far = self._far(loop.steps)
        near = [load for load in loop.loads if not load.is_far]
        sources = (*loop.around, loop.stmt, *near, *(bind.value for bind in loop.binds))
        others = [load for load in loop.loads if load.is_far]
        read = self._read(sources) | self._read(others) - far | self._read(loop.gates) - flags
        # Writes at peers are loaded there after a wait, or a barrier.
        own = {access.root for access in self._effects.writes if access.at is None}
        if (read - tiles) & own or far & _written(self._order.names.all_effects(loop.stmt)):
            raise Declined("the program writes the source of its loads")

    def _named(self, node: Any) -> Iterator[tuple[ir.Var, bool]]:
        """The tiles and tensors that a node names, behind views, and whether it writes them."""
        for buffer, _, writes in accesses(node):
            yield self.stage.distributions.base(buffer), writes

    def _far(self, steps: Iterable[GatedStep]) -> set[ir.Var]:
        """The tensors that are loaded from peers."""
        sources = [step.source for step in steps if isinstance(step, ProducerLoad) and step.is_far]
        return {self.stage.distributions.base(ir.region_parts(source)[0]) for source in sources}

    def _read(self, nodes: Iterable[Any]) -> set[ir.Var]:
        return {data for node in nodes for expr in expressions(node) for data, _ in self._named(expr)}


def loops_of(around: EnclosingLoops) -> list[ir.For]:
    """The loops among enclosing statements."""
    return [outer for outer in around if isinstance(outer, ir.For)]


def expressions(node: Any) -> list[ir.PrimExpr]:
    """The expressions of a load, a wait, the head of a loop or a condition."""
    if isinstance(node, ProducerLoad):
        return [node.call]
    if isinstance(node, ir.For):
        return [node.min, node.extent]
    if isinstance(node, ir.Stmt):
        inner = [stmt for stmt in ir.statements(node) if not isinstance(stmt, ir.SeqStmt)]
        return [stmt.condition if isinstance(stmt, ir.IfThenElse) else stmt.value for stmt in inner]
    return [node]


def used_binds(binds: Sequence[ir.Bind], by: Iterable[ir.PrimExpr]) -> list[ir.Bind]:
    """The bindings that expressions need, in order."""
    needed: set[ir.Var] = set().union(*map(ir.variables, by))
    found: list[ir.Bind] = []
    for bind in reversed(binds):
        if bind.var in needed and ir.op_name(bind.value) != ops.VIEW.name:
            needed |= ir.variables(bind.value)
            found.insert(0, bind)
    return found


def _written(effects: Effects) -> set[ir.Var]:
    return {access.root for access in effects.writes}


def _is_pointer(node: Any) -> bool:
    return ir.op_name(node) == tl.ACCESS_PTR
