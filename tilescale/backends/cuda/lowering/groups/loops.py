# SPDX-License-Identifier: MIT
"""Find the pipelined loops whose loads a warpgroup of its own can issue ahead of the units that work on the tiles.

Why: such a loader runs beside everything else of the program, so nothing may order its loads but the tiles themselves.
Before: a phase. After: its loops taken apart into loads and statements of units (pipelines.py lowers them). Nothing is
rewritten.

Declines: launches without room for a loader, loops whose loads a wait before or in them orders, loops inside loops or
conditions, tiles that have another use, sources that the program writes, copies that are none in bulk, and loops before
whose end programs of a cluster synchronize, for which all threads have to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tilelang_core import ir, tl
from tilelang_core.tiles import TileCopy, is_region
from tilescale.backends.cuda.lowering.clusters.dsmem import is_barrier
from tilescale.backends.cuda.lowering.groups.distribution import accesses
from tilescale.backends.cuda.lowering.groups.state import GroupStage
from tilescale.backends.cuda.lowering.groups.unit import threads_of
from tilescale.hda import Level, Machine
from tilescale.program import ops
from tilescale.program.dependence import Dependence

LOADER_THREADS = 128
"""A warpgroup: registers move from and to whole ones (PTX ISA, `setmaxnreg`)."""

WARP = 32

MOST_THREADS = 1024
FIRST_ARCHITECTURE = 9
"""Compute capability of the first processors with bulk copies and barriers that count bytes."""

BULK, LONGEST, RANKS = 16, 256, 5
"""Bulk copies (CUDA driver API, cuTensorMapEncodeTiled): bytes that make up strides, rows of a box, dimensions."""


@dataclass(frozen=True)
class Loop:
    """A pipelined loop, taken apart.

    Attributes:
        level: whose units work in it.
        loads: its copies from memory into tiles.
        binds: the names that loads and extents use, bound before the loop or in it (`inner`).
        rest: what units execute.
    """

    stmt: ir.For
    level: Level
    loads: tuple[TileCopy, ...]
    binds: tuple[ir.Bind, ...]
    inner: tuple[ir.Bind, ...]
    rest: tuple[ir.Stmt, ...]

    @property
    def tiles(self) -> list[ir.Buffer]:
        """What is loaded."""
        return [ir.region_parts(load.target)[0] for load in self.loads]

    @property
    def stages(self) -> int:
        """Tiles of a kind that there are."""
        return ir.integer(self.stmt.annotations["num_stages"])


def architecture(machine: Machine) -> int:
    """The major compute capability of a machine; 0 if nothing says it."""
    major = machine.identify.architecture.partition(".")[0]
    return int(major) if major.isdigit() else 0


def asynchronous(stage: GroupStage) -> list[Loop]:
    """The loops of a phase that can run beside a loader, in order."""
    return _Search(stage).found


class _Search:
    def __init__(self, stage: GroupStage):
        self.stage, self.phase = stage, stage.phase.stmt
        self.found: list[Loop] = []
        self._waits: list[ir.Call] = []  # passed so far for other programs or devices
        self._has_met_cluster = False
        if self._has_room():
            self._walk(self.phase, [])

    def _has_room(self) -> bool:
        launch = self.stage.launch
        threads = launch.thread_count
        fits = threads % LOADER_THREADS == 0 and threads + LOADER_THREADS <= MOST_THREADS
        modern = architecture(self.stage.target.machine) >= FIRST_ARCHITECTURE
        return modern and fits and launch.threads[1:] == (1, 1)

    def _waits_for_others(self, node: Any) -> bool:
        name = ir.op_name(node)
        if name not in ops.COLLECTIVES | {ops.WAIT.name, ops.BARRIER.name}:
            return False
        level = ir.attribute(node, "level")
        return level is None or self.stage.level(str(level)).kind != "thread_group"

    def _walk(self, stmt: ir.Stmt, binds: list[ir.Bind]) -> None:
        """Loops that every thread reaches, once."""
        if isinstance(stmt, ir.SeqStmt):
            for inner in stmt.seq:
                self._walk(inner, binds)
        elif isinstance(stmt, ir.AttrStmt) and self.stage.level_of(stmt) is None:
            self._walk(stmt.body, binds)
        else:
            ir.walk(stmt, lambda node: self._waits.append(node) if self._waits_for_others(node) else None)
            self._has_met_cluster |= ir.contains(stmt, is_barrier)
            if isinstance(stmt, ir.Bind):
                binds.append(stmt)
            if isinstance(stmt, ir.For) and "num_stages" in stmt.annotations:
                self._loop(stmt, binds)

    def _loop(self, stmt: ir.For, binds: list[ir.Bind]) -> None:
        loop = self._taken_apart(stmt, binds)
        if self._has_met_cluster:
            return
        if loop is not None and self._is_gated(loop):
            name = stmt.loop_var.name
            self.stage.notes.append(f"T.Pipelined over {name}: in order, as the program waits for what it loads")
        elif loop is not None and self._stands_alone(loop):
            self.found.append(loop)

    # -- one loop ------------------------------------------------------------------------------------------------------

    def _taken_apart(self, stmt: ir.For, binds: list[ir.Bind]) -> Loop | None:
        body = list(stmt.body.seq) if isinstance(stmt.body, ir.SeqStmt) else [stmt.body]
        loads = [TileCopy.of(inner.value) for inner in body if self._is_load(inner)]
        rest = [inner for inner in body if not self._is_load(inner)]
        inner = [bind for bind in rest if isinstance(bind, ir.Bind)]
        levels = [self.stage.level_of(other) for other in rest if not isinstance(other, ir.Bind)]
        level = levels[0] if levels else None
        if not loads or level is None or any(other != level for other in levels) or threads_of(level) % LOADER_THREADS:
            return None
        if set(stmt.annotations) != {"num_stages"} or (ir.constant(stmt.annotations["num_stages"]) or 0) < 1:
            return None
        used = _used([*binds, *inner], [stmt.min, stmt.extent, *(load.call for load in loads)])
        return Loop(stmt, level, tuple(loads), tuple(used), tuple(b for b in inner if b in used), tuple(rest))

    def _is_load(self, stmt: ir.Stmt) -> bool:
        """A bulk copy from memory into all of a tile in shared memory."""
        if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.COPY:
            return False
        copy = TileCopy.of(stmt.value)
        if not is_region(copy.source):
            return False
        source, _, box = ir.region_parts(copy.source)
        tile, begins, extents = ir.region_parts(copy.target)
        shape = ir.constants(tile.shape)
        if shape is None:
            return False
        whole = all(ir.constant(b) == 0 for b in begins) and [ir.constant(n) for n in extents] == shape
        alike = [n for n in map(ir.constant, box) if n != 1] == [n for n in shape if n != 1]
        between = source.scope() == "global" and tile.scope() == "shared.dyn" and str(source.dtype) == str(tile.dtype)
        return whole and alike and between and self._is_bulk(source, shape)

    def _is_bulk(self, source: ir.Buffer, box: list[int]) -> bool:
        size = ir.bits(str(source.dtype)) // 8
        if not size or len(source.shape) > RANKS or box[-1] * size % BULK or max(box[:-1], default=LONGEST) > LONGEST:
            return False
        stride = size
        for extent in source.shape[:0:-1]:
            stride *= ir.constant(self.stage.phase.sized(extent)) or 1
            if stride % BULK:
                return False
        return True

    def _is_gated(self, loop: Loop) -> bool:
        """Whether a wait in front of a loop, or in it, is for what its loads read."""
        tiles = {tile.data for tile in loop.tiles}
        read = {data for load in loop.loads for data, _ in self._named(load.call)} - tiles
        return any(self._order.gates(wait, data) for wait in self._waits for data in read)

    @cached_property
    def _order(self) -> Dependence:
        return Dependence(self.stage.program, self.stage.target.machine)

    def _stands_alone(self, loop: Loop) -> bool:
        """Whether nothing but its loads writes the tiles or their sources, and nothing outside names the tiles."""
        tiles = {tile.data for tile in loop.tiles}
        noted = any(isinstance(note, dict) and tiles & set(note) for _, note in self.stage.launch.notes)
        held = any(self.stage.distributions.of(tile) or self.stage.owner(tile) for tile in loop.tiles)
        if len(tiles) < len(loop.loads) or noted or held or ir.contains(self.phase, _is_pointer):
            return False
        inside = [*self._named(loop.stmt)]
        everywhere = [*self._named(self.phase)]
        if sum(data in tiles for data, _ in everywhere) != sum(data in tiles for data, _ in inside):
            return False
        written = [data for data, writes in everywhere if writes]
        sources = (*(load.call for load in loop.loads), *loop.binds)
        read = {data for part in sources for data, _ in self._named(part)} - tiles
        return sum(data in tiles for data in written) == len(tiles) and not read & set(written)

    def _named(self, node: Any) -> Iterator[tuple[ir.Var, bool]]:
        """The tiles and tensors that a node names, behind views, and whether it writes them."""
        for buffer, _, writes in accesses(node):
            yield self.stage.distributions.base(buffer), writes


def _used(binds: list[ir.Bind], by: list[Any]) -> list[ir.Bind]:
    """The bindings that something needs, in order."""
    needed: set[ir.Var] = set()
    for node in by:
        needed |= ir.variables(node) if isinstance(node, ir.PrimExpr) else set()
    found: list[ir.Bind] = []
    for bind in reversed(binds):
        if bind.var in needed and ir.op_name(bind.value) != ops.VIEW.name:
            needed |= ir.variables(bind.value)
            found.insert(0, bind)
    return found


def _is_pointer(node: Any) -> bool:
    return ir.op_name(node) == tl.ACCESS_PTR
