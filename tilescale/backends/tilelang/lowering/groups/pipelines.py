# SPDX-License-Identifier: MIT
"""Run pipelined loops of units asynchronously: a warpgroup of its own loads tiles ahead, the units work on them.

Why: a loop that all threads enter together, iteration after iteration, waits for its loads. Before: a `T.Pipelined`
loop of the program whose body is copies into tiles, from memory of this device or of peers, waits, and statements that
units execute. After: 128 more threads, the loader, issue those copies in bulk into a ring of tiles, and wait in front
of those that are to be behind a wait; each unit runs the loop in its own branch. Tiles are handed over by barriers in
shared memory: `full` counts their bytes, `empty` the threads that have used them. Where something in front of a loop
orders its loads, units say by a third one, `released`, that they have come to it.

The target is roles by hand and not stock TileLang's `WSSchedule`: a pipeline there has one consumer role, while tiles
here are read by several units, which also synchronize with one another inside the loop.

Leaves to the in-order lowering what loops.py declines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups.clones import UnitClone
from tilescale.backends.tilelang.lowering.groups.distribution import accesses
from tilescale.backends.tilelang.lowering.groups.loops import (
    EnclosingLoops,
    PipelinedLoop,
    asynchronous,
    expressions,
    loops_of,
    used_binds,
)
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.backends.tilelang.lowering.groups.tile_handoff import TileHandoff, parts_of
from tilescale.backends.tilelang.lowering.groups.unit import UnitThreads
from tilescale.backends.tilelang.lowering.markers import acquired, by_producer, loading
from tilescale.backends.tilelang.lowering.role_graph import mbarriers
from tilescale.backends.tilelang.lowering.role_graph.graph import COMPUTE, LOAD, Channel, Role, RoleGraph
from tilescale.backends.tilelang.lowering.role_graph.loads import ProducerLoad
from tilescale.backends.tilelang.ptx import WARP, WARPGROUP

ASYNCHRONOUS_PRODUCTS = "wgmma"
"""The capability of warpgroups that start products into registers and wait for them later."""


Statements: TypeAlias = Callable[[Sequence[ir.Stmt], UnitThreads, UnitClone, frozenset[ir.Var]], ir.Stmt]
"""One unit's part of statements, inside the clone of a loop, in which tiles are kept as they are."""


class UnitPipelines:
    """The asynchronous loops of a phase. `loops`: them, in order."""

    def __init__(self, stage: GroupStage):
        self.stage = stage
        self._rings: dict[ir.Var, ir.Buffer] = {}
        self._parts: dict[ir.For, int] = {}
        self._handed: dict[ir.For, tuple[ir.Buffer, ir.Buffer]] = {}
        self._released: dict[ir.For, ir.Buffer] = {}
        self.loops = asynchronous(stage)
        for number, loop in enumerate(self.loops):
            self._allocate(loop, f"_{number}" if number else "")

    def _allocate(self, loop: PipelinedLoop, number: str) -> None:
        tiles = self.stage.tiles
        parts = self._parts[loop.stmt] = parts_of(self.stage, loop)
        places = loop.stages * parts
        for tile in loop.tiles:
            rows, *columns = map(ir.integer, tile.shape)
            shape = [places, rows // parts, *columns]
            self._rings[tile.data] = tir.local_buffer(tile.name, shape, str(tile.dtype), tile.scope())
            tiles.append(self._rings[tile.data])
        threads, mbarrier = self.stage.whole.threads, self.stage.mbarrier
        full = mbarrier(f"full{number}", [1] * places)
        self._handed[loop.stmt] = full, mbarrier(f"empty{number}", [threads] * places)
        if loop.released:
            self._released[loop.stmt] = mbarrier(f"released{number}", [threads])

    def of(self, stmt: ir.Stmt) -> PipelinedLoop | None:
        """The asynchronous loop that a statement is."""
        return next((loop for loop in self.loops if loop.stmt.same_as(stmt)), None)

    def moves(self, stmt: ir.Stmt) -> bool:
        """Whether a statement of the program is a wait that the loader makes instead."""
        return any(stmt.same_as(wait) for loop in self.loops for wait in loop.moved)

    @property
    def graph(self) -> RoleGraph:
        """The roles and channels of the loops."""
        if not self.loops:
            return RoleGraph()
        roles = Role(COMPUTE, self.stage.whole.threads), Role(LOAD, WARPGROUP)
        graph = RoleGraph(roles, tuple(map(self._channel, self.loops)))
        return graph.with_registers(self.stage.target.machine)

    def _channel(self, loop: PipelinedLoop) -> Channel:
        # Loads of a loop without waits that is released come behind what the program waits for.
        free = loop.free if loop.gates or not loop.released else []
        sources = [(load.is_far, self.stage.distributions.base(ir.region_parts(load.source)[0])) for load in free]
        near, far = (frozenset(data for is_far, data in sources if is_far == side) for side in (False, True))
        return Channel(
            "tiles", loop.tiles, loop.stages, gates=len(loop.waits), parts=self._parts[loop.stmt],
            is_released=loop.released, near=near, far=far, is_free=True,
        )  # fmt: skip

    # -- units ---------------------------------------------------------------------------------------------------------

    def work(self, loop: PipelinedLoop, unit: UnitThreads, statements: Statements) -> ir.Stmt:
        """The loop of one unit, of whose body `statements` gives its part."""
        clone = UnitClone(self.stage, unit)
        step = clone.values[loop.stmt.loop_var] = ir.Var(loop.stmt.loop_var.name, str(loop.stmt.loop_var.dtype))
        begin, extent = (clone.expr(n) for n in (loop.stmt.min, loop.stmt.extent))
        number = _iterations(loop, clone.expr(loop.iteration), extent, step - begin)
        stage, phase = mbarriers.stage_of(number, loop.stages)
        full, empty = self._handed[loop.stmt]
        body = statements(loop.rest, unit, clone, self._kept(loop))
        parts = self._parts[loop.stmt]
        places = [stage * parts + part for part in range(parts)]
        waits = [mbarriers.wait(full, at, phase) for at in places]
        arrivals = [mbarriers.arrive(empty, at) for at in places]
        overlaps = self.stage.target.machine.has(ASYNCHRONOUS_PRODUCTS)
        hand = TileHandoff(waits, arrivals, overlaps, first=bool(loop.gates))
        steps = hand.over(body, {tile.data: ir.integer(tile.shape[0]) // parts for tile in loop.tiles})
        body = self._on_rings(tir.sequence(steps), stage * parts)
        nest = tir.at(ir.For(step, begin, extent, ir.ForKind.SERIAL, body), loop.stmt)
        released = self._released.get(loop.stmt)
        return nest if released is None else tir.sequence([acquired(), mbarriers.arrive(released, 0), nest])

    def _kept(self, loop: PipelinedLoop) -> frozenset[ir.Var]:
        named = [access for stmt in loop.rest for access in accesses(stmt)]
        bases = [(self.stage.distributions.base(buffer), writes) for buffer, _, writes in named]
        return frozenset(base for base, _ in bases) - {base for base, writes in bases if writes}

    def _on_rings(self, stmt: ir.Stmt, first: Any) -> ir.Stmt:
        """A statement on the places of the rings that begin with `first`."""

        def leave(node: ir.Node) -> Any:
            if isinstance(node, ir.BufferLoad) and node.buffer.data in self._rings:
                ring, (row, *columns) = self._rings[node.buffer.data], node.indices
                at = ir.simplify(first + row // ring.shape[1], {}), ir.simplify(row % ring.shape[1], {})
                return ir.BufferLoad(ring, [*at, *columns])
            return tiles.with_leading_one(node) if tiles.is_region(node) else None

        return tir.rewrite(stmt, leave=leave)

    # -- the loader ----------------------------------------------------------------------------------------------------

    def loader(self) -> list[ir.Stmt]:
        if not self.loops:
            return []
        # Only one of its warps: a warp that sees a phase of a barrier late may miss the next one, and wait forever.
        first = ir.simplify(self.stage.thread < self.stage.whole.threads + WARP, {})
        return [loading(ir.IfThenElse(first, tir.sequence([*map(self._load, self.loops)]), None))]

    def _load(self, loop: PipelinedLoop) -> ir.Stmt:
        return self._within(loop, loop.around, {})

    def _within(self, loop: PipelinedLoop, around: EnclosingLoops, fresh: dict[ir.Var, Any]) -> ir.Stmt:
        """A loop inside the rest of its enclosing statements; `fresh` are the loader's names so far."""
        if not around:
            return self._nest(loop, fresh)
        outer, *rest = around
        binds = _named([bind for bind in used_binds(loop.binds, expressions(outer)) if bind.var not in fresh], fresh)
        if not isinstance(outer, ir.For):
            body = ir.IfThenElse(ir.substitute(outer, fresh), self._within(loop, tuple(rest), fresh), None)
            return tir.sequence([*binds, body])
        begin, extent = (ir.substitute(n, fresh) for n in (outer.min, outer.extent))
        var = fresh[outer.loop_var] = _again(outer.loop_var)
        body = self._within(loop, tuple(rest), fresh)
        return tir.sequence([*binds, ir.For(var, begin, extent, ir.ForKind.SERIAL, body)])

    def _nest(self, loop: PipelinedLoop, fresh: dict[ir.Var, Any]) -> ir.Stmt:
        binds = _named([bind for bind in loop.binds if bind not in loop.inner and bind.var not in fresh], fresh)
        step = fresh[loop.stmt.loop_var] = _again(loop.stmt.loop_var)
        begin, extent, iteration = (ir.substitute(n, fresh) for n in (loop.stmt.min, loop.stmt.extent, loop.iteration))
        inner = _named(loop.inner, fresh)
        stage, parity = mbarriers.stage_of(_iterations(loop, iteration, extent, step - begin), loop.stages)
        issued: list[ir.Stmt] = []
        for part in range(self._parts[loop.stmt]):
            place = stage * self._parts[loop.stmt] + part
            empty = mbarriers.wait(self._handed[loop.stmt][1], place, 1 - parity)
            issued += [empty, *self._issued(loop, place, part, fresh)]
        nest = ir.For(step, begin, extent, ir.ForKind.SERIAL, tir.sequence([*inner, *issued]))
        released = self._released.get(loop.stmt)
        comes = [] if released is None else [acquired(mbarriers.wait(released, 0, iteration % 2))]
        return tir.sequence([*binds, *comes, nest])

    def _issued(self, loop: PipelinedLoop, place: Any, part: int, fresh: dict[ir.Var, Any]) -> list[ir.Stmt]:
        """The loads of a part, which one thread issues; before the first part, the waits in front of them."""
        full = self._handed[loop.stmt][0]
        elected = tir.call(tl.ELECT, WARP, dtype="bool")
        result: list[ir.Stmt] = []
        copies: list[ir.Stmt] = []
        for step in loop.steps:
            if isinstance(step, ProducerLoad):
                copies.append(self._copy(step, ir.BufferLoad(full, [place]), place, part, fresh))
            elif part == 0:
                result += [ir.IfThenElse(elected, tir.sequence(copies), None)] if copies else []
                result.append(tir.at(by_producer(ir.substitute(step, fresh)), step))
                copies = []
        return [*result, ir.IfThenElse(elected, tir.sequence([*copies, mbarriers.arrive(full, place)]), None)]

    def _copy(
        self, load: ProducerLoad, full: ir.BufferLoad, place: Any, part: int, fresh: dict[ir.Var, Any]
    ) -> ir.Stmt:
        load = load.under(fresh)
        source, begins, extents = ir.region_parts(load.source)
        tile = ir.region_parts(load.target)[0]
        ring = self._rings[tile.data]
        box = [ir.integer(n) for n in ring.shape[1:]]
        target = tir.region(ring, [place, *[0] * len(box)], [1, *box], "w")
        if ir.constant(tile.shape[0]) != box[0]:
            axis = next(axis for axis, extent in enumerate(extents) if ir.constant(extent) != 1)
            begins[axis], extents[axis] = begins[axis] + part * box[0], ir.int_node(box[0])
        read = tir.region(source, begins, extents, "r")
        return load.made(read, target, full)


def _again(var: ir.Var) -> ir.Var:
    return ir.Var(var.name, str(var.dtype))


def _named(binds: Iterable[ir.Bind], fresh: dict[ir.Var, Any]) -> list[ir.Stmt]:
    """Bindings under names of the loader's own, which are noted."""
    made: list[ir.Stmt] = []
    for bind in binds:
        value = ir.substitute(bind.value, fresh)
        fresh[bind.var] = _again(bind.var)
        made.append(ir.Bind(fresh[bind.var], value))
    return made


def _iterations(loop: PipelinedLoop, iteration: Any, extent: Any, now: Any) -> Any:
    """Number of earlier iterations of a loop, including those in earlier iterations of the enclosing loops."""
    return iteration * extent + now if loops_of(loop.around) else now
