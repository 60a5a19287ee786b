# SPDX-License-Identifier: MIT
"""Run pipelined loops of units asynchronously: a warpgroup of its own loads tiles ahead, the units work on them.

Why: a loop that all threads enter together, iteration after iteration, waits for its loads. Before: a `T.Pipelined`
loop of the program whose body is copies from memory into tiles, and statements that units execute. After: 128 more
threads, the loader, issue those copies in bulk into a ring of tiles; each unit runs the loop in its own branch. Tiles
are handed over by barriers in shared memory: `full` counts their bytes, `empty` the threads that have used them.

The target is roles by hand and not stock TileLang's `WSSchedule`: a pipeline there has one consumer role, while tiles
here are read by several units, which also synchronize with one another inside the loop.

Leaves to the in-order lowering what loops.py declines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.groups.clones import Clone
from tilescale.backends.cuda.lowering.groups.distribution import accesses
from tilescale.backends.cuda.lowering.groups.handover import Handover, parts_of
from tilescale.backends.cuda.lowering.groups.loops import LOADER_THREADS, WARP, Loop, architecture, asynchronous
from tilescale.backends.cuda.lowering.groups.state import GroupStage
from tilescale.backends.cuda.lowering.groups.unit import Unit
from tilescale.backends.cuda.lowering.markers import loading

REGISTERS, LOADER_REGISTERS, MOST_REGISTERS = 65536, 24, 240
"""Of a multiprocessor; of a thread that loads; of a thread that works, at most (they come in steps of 8)."""

ASYNCHRONOUS_PRODUCTS = 9
"""Compute capability of the processors whose warpgroups start products into registers and wait for them later."""


Statements: TypeAlias = Callable[[Sequence[ir.Stmt], Unit, Clone, frozenset[ir.Var]], ir.Stmt]
"""One unit's part of statements, inside the clone of a loop, in which tiles are kept as they are."""


class Pipelines:
    """The asynchronous loops of a phase.

    Attributes:
        loops: them, in order.
    """

    def __init__(self, stage: GroupStage):
        self.stage = stage
        self.arrivals: dict[ir.Var, list[ir.PrimExpr]] = {}
        self._rings: dict[ir.Var, ir.Buffer] = {}
        self._parts: dict[ir.For, int] = {}
        self._handed: dict[ir.For, tuple[ir.Buffer, ir.Buffer]] = {}
        self.loops = asynchronous(stage)
        for number, loop in enumerate(self.loops):
            self._allocate(loop, f"_{number}" if number else "")

    def _allocate(self, loop: Loop, number: str) -> None:
        """The rings of a loop, and its barriers."""
        tiles = self.stage.tiles
        parts = self._parts[loop.stmt] = parts_of(self.stage, loop)
        places = loop.stages * parts
        for tile in loop.tiles:
            rows, *columns = map(ir.integer, tile.shape)
            shape = [places, rows // parts, *columns]
            self._rings[tile.data] = tir.local_buffer(tile.name, shape, str(tile.dtype), tile.scope())
            tiles.append(self._rings[tile.data])
        pair = [tir.local_buffer(name + number, [places], "uint64", "shared.barrier") for name in ("full", "empty")]
        for barrier, arrivals in zip(pair, (1, self.stage.whole.threads), strict=True):
            self.arrivals[barrier.data] = [ir.int_node(arrivals)] * places
            tiles.append(barrier)
        self._handed[loop.stmt] = (pair[0], pair[1])
        self._note(loop)

    def _note(self, loop: Loop) -> None:
        first = self.stage.whole.threads
        names = ", ".join(tile.name for tile in loop.tiles)
        units = self.stage.whole.units(loop.level)
        self.stage.notes.append(
            f"T.Pipelined over {loop.stmt.loop_var.name}: threads {first} to {first + LOADER_THREADS - 1} load {names} "
            f"by TMA, {loop.stages} ahead; {len(units)} {loop.level.name}s work on them"
        )

    def of(self, stmt: Any) -> Loop | None:
        """The asynchronous loop that a statement is."""
        return next((loop for loop in self.loops if loop.stmt.same_as(stmt)), None)

    @property
    def added(self) -> int:
        """Threads of the loader."""
        return LOADER_THREADS if self.loops else 0

    @property
    def ahead(self) -> frozenset[ir.Var]:
        """The tensors that it loads."""
        return frozenset(ir.region_parts(load.source)[0].data for loop in self.loops for load in loop.loads)

    # -- units ---------------------------------------------------------------------------------------------------------

    def work(self, loop: Loop, unit: Unit, statements: Statements) -> ir.Stmt:
        """The loop of one unit, of whose body `statements` gives its part."""
        clone = Clone(self.stage, unit)
        step = clone.values[loop.stmt.loop_var] = ir.Var(loop.stmt.loop_var.name, str(loop.stmt.loop_var.dtype))
        begin, extent = (clone.expr(n) for n in (loop.stmt.min, loop.stmt.extent))
        stage, turn = _turn(loop, step - begin)
        full, empty = self._handed[loop.stmt]
        body = statements(loop.rest, unit, clone, self._kept(loop))
        parts = self._parts[loop.stmt]
        places = [stage * parts + part for part in range(parts)]
        waits, arrivals = [_wait(full, at, turn) for at in places], [_arrive(empty, at) for at in places]
        hand = Handover(waits, arrivals, architecture(self.stage.target.machine) == ASYNCHRONOUS_PRODUCTS)
        steps = hand.over(body, {tile.data: ir.integer(tile.shape[0]) // parts for tile in loop.tiles})
        body = self._on_rings(tir.sequence(steps), stage * parts)
        return tir.at(ir.For(step, begin, extent, ir.ForKind.SERIAL, body), loop.stmt)

    def _kept(self, loop: Loop) -> frozenset[ir.Var]:
        """The tiles that no unit writes in a loop."""
        named = [access for stmt in loop.rest for access in accesses(stmt)]
        bases = [(self.stage.distributions.base(buffer), writes) for buffer, _, writes in named]
        return frozenset(base for base, _ in bases) - {base for base, writes in bases if writes}

    def _on_rings(self, stmt: ir.Stmt, first: Any) -> ir.Stmt:
        """A statement on the places of the rings that begin with `first`."""

        def leave(node: Any) -> Any:
            if isinstance(node, ir.BufferLoad) and node.buffer.data in self._rings:
                ring, (row, *columns) = self._rings[node.buffer.data], node.indices
                at = ir.simplify(first + row // ring.shape[1], {}), ir.simplify(row % ring.shape[1], {})
                return ir.BufferLoad(ring, [*at, *columns])
            return tiles.with_leading_one(node) if tiles.is_region(node) else None

        return tir.rewrite(stmt, leave=leave)

    # -- the loader ----------------------------------------------------------------------------------------------------

    def loader(self) -> list[ir.Stmt]:
        """What the loader executes beside the program, if there is one."""
        if not self.loops:
            return []
        left = (REGISTERS - LOADER_THREADS * LOADER_REGISTERS) // self.stage.whole.threads
        limits = (LOADER_REGISTERS, min(left // 8 * 8, MOST_REGISTERS))
        # One warp of it: who sees a phase of a barrier late may miss the next one, and waits for it for ever.
        first = ir.simplify(self.stage.thread < self.stage.whole.threads + WARP, {})
        return [loading(ir.IfThenElse(first, tir.sequence([*map(self._load, self.loops)]), None), limits)]

    def _load(self, loop: Loop) -> ir.Stmt:
        fresh = {bind.var: ir.Var(bind.var.name, str(bind.var.dtype)) for bind in loop.binds}
        var = loop.stmt.loop_var
        step = fresh[var] = ir.Var(var.name, str(var.dtype))
        begin = ir.substitute(loop.stmt.min, fresh)
        stage, turn = _turn(loop, step - begin)
        full, empty = self._handed[loop.stmt]
        elected = tir.call(tl.ELECT, WARP, dtype="bool")
        issued: list[ir.Stmt] = []
        for part in range(self._parts[loop.stmt]):
            place = stage * self._parts[loop.stmt] + part
            copies = [self._copy(load, ir.BufferLoad(full, [place]), place, part, fresh) for load in loop.loads]
            issue = ir.IfThenElse(elected, tir.sequence([*copies, _arrive(full, place)]), None)
            issued += [_wait(empty, place, 1 - turn), issue]

        def names(inside: bool) -> list[ir.Stmt]:
            return [
                ir.Bind(fresh[bind.var], ir.substitute(bind.value, fresh))
                for bind in loop.binds
                if (bind in loop.inner) == inside
            ]

        body = tir.sequence([*names(True), *issued])
        nest = ir.For(step, begin, ir.substitute(loop.stmt.extent, fresh), ir.ForKind.SERIAL, body)
        return tir.sequence([*names(False), nest])

    def _copy(
        self, load: tiles.TileCopy, full: ir.BufferLoad, place: Any, part: int, fresh: dict[ir.Var, Any]
    ) -> ir.Stmt:
        source, begins, extents = ir.region_parts(load.source)
        tile = ir.region_parts(load.target)[0]
        ring = self._rings[tile.data]
        box = [ir.integer(n) for n in ring.shape[1:]]
        target = tir.region(ring, [place, *[0] * len(box)], [1, *box], "w")
        begins = [ir.substitute(b, fresh) if isinstance(b, ir.PrimExpr) else b for b in begins]
        if ir.constant(tile.shape[0]) != box[0]:
            axis = next(axis for axis, extent in enumerate(extents) if ir.constant(extent) != 1)
            begins[axis], extents[axis] = begins[axis] + part * box[0], ir.int_node(box[0])
        read = tir.region(source, begins, extents, "r")
        return tir.tile_call("tma_copy", read, target, barrier=full, is_tma_copy=1)


def _turn(loop: Loop, done: Any) -> tuple[Any, Any]:
    """The stage of an iteration, and the parity of the phase that its barriers complete in it."""
    return done % loop.stages, done // loop.stages % 2


def _wait(barrier: ir.Buffer, stage: Any, turn: Any) -> ir.Stmt:
    return tir.evaluate(tir.call(tl.WAIT_BARRIER_PARITY, ir.BufferLoad(barrier, [stage]), turn))


def _arrive(barrier: ir.Buffer, stage: Any) -> ir.Stmt:
    return tir.evaluate(tir.call(tl.ARRIVE_BARRIER, ir.BufferLoad(barrier, [stage])))
