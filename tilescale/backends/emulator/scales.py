# SPDX-License-Identifier: MIT
"""`T.Scale` regions and views: which units run a region, and which part of a tile each of them sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.access import Region
from tilescale.backends.emulator.compiler import Compiler, value_operation
from tilescale.backends.emulator.expr import Closure
from tilescale.backends.emulator.frame import Frame
from tilescale.backends.emulator.scheduler import Wait
from tilescale.backends.emulator.units import Bound, Replica, Unit
from tilescale.errors import UnsupportedError
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program.layout import Layout
from tilescale.program.ops import ALL_OPS, RANK, VIEW


def compile_scale(compiler: Compiler, stmt: ir.AttrStmt) -> Closure:
    """A scale inside the grid. A finer level than the executing one forks; a coarser one only selects ranks."""
    level = compiler.machine.level(str(stmt.value.value))
    outer = compiler.executing
    executes = compiler.enters(level)
    compiler.scales.append(executes)
    vector = executes.kind == "lanes" and executes.threads == 1 and not _works_on_tiles(stmt.body)
    saved, compiler.vector_level = compiler.vector_level, level.name if vector else compiler.vector_level
    body = compiler.stmt(stmt.body)
    compiler.vector_level = saved
    compiler.scales.pop()
    if vector or executes == outer:
        return body
    where = location(stmt)
    if executes.kind == "cluster":
        return lambda frame: frame.program.cluster.execute(body, frame, where)
    if executes.kind == "program":
        return lambda frame: frame.program.cluster.fork(body, frame, where)
    return _fork_lanes(compiler, stmt, executes, body)


def _works_on_tiles(stmt: ir.Stmt) -> bool:
    def tile_operation(node: Any) -> bool:
        name = ir.op_name(node) or ""
        return name.startswith("tl.tileop.") or name in ALL_OPS - {RANK.name}

    return ir.contains(stmt, tile_operation)


def _fork_lanes(compiler: Compiler, stmt: ir.AttrStmt, level: Level, body: Closure) -> Closure:
    owned = compiler.owned_by(level.name)
    replicated = _replicas_in(compiler, stmt.body)
    where = location(stmt)

    def run(frame: Frame) -> None:
        frames = []
        threads = np.arange(frame.threads) if frame.own is None else np.flatnonzero(frame.own)
        count = len(threads) // level.threads
        for rank in range(count):
            unit = frame.unit.child(level.name, rank)
            unit.siblings = count
            own = np.zeros(frame.threads, bool)
            own[threads[rank * level.threads : (rank + 1) * level.threads]] = True
            side = frame.fork(unit, own)
            compiler.allocate(owned, unit, side)
            frames.append(side)
        run_together(frame, body, frames, where)
        for slot in replicated:
            first = frames[0].unit.replicas.get(slot)
            if first is not None:
                np.copyto(frame.slots[slot], first.array)

    return run


def run_together(frame: Frame, body: Closure, frames: list[Frame], where: Any) -> None:
    """Run `body` on every frame as a coroutine of its own; return when all have ended."""
    if len(frames) == 1:
        body(frames[0])
        return
    scheduler = frame.run.scheduler
    running = len(frames)

    def finished() -> None:
        nonlocal running
        running -= 1

    for side in frames:
        scheduler.spawn(str(side.unit), lambda s=side: body(s), finished)
    scheduler.block(Wait(lambda: running == 0, "its units", where=where, quiet=True))


def _replicas_in(compiler: Compiler, stmt: ir.Stmt) -> list[int]:
    found: set[int] = set()

    def visit(node: Any) -> None:
        if ir.op_name(node) == VIEW.name and ir.attribute(node, "dim") is None:
            found.add(compiler.slot(ir.region_parts(node.args[0])[0].data))

    ir.walk(stmt, visit)
    return sorted(found)


@value_operation(RANK.name)
def _rank(compiler: Compiler, call: ir.Call) -> Closure:
    name = str(call.args[0].value)
    if name == compiler.vector_level:
        return lambda frame: np.arange(frame.threads, dtype=np.int32) % _siblings_in_parent(frame)
    return lambda frame: frame.unit.around(name).rank


def _siblings_in_parent(frame: Frame) -> int:
    return frame.threads if frame.own is None else int(frame.own.sum())


# -- views ---------------------------------------------------------------------------------------------------------------


class ViewOf:
    """A `T.view`: resolves to the array that a unit sees."""

    def __init__(self, compiler: Compiler, call: ir.Call):
        self.compiler = compiler
        self.level = compiler.machine.level(ir.attribute(call, "level"))
        self.region = Region(compiler, call.args[0])
        self.layout = Layout(ir.attribute(call, "dim"), ir.attribute(call, "block"))
        self.whole = self.level.kind == "unit" and self.region.home.guarded

    def resolve(self, frame: Frame, unit: Unit) -> np.ndarray:
        """What `unit` sees; begins and extents are those of `frame`."""
        slot = self.region.home.slot
        base = frame.slots[slot] if unit is frame.unit else instance(self.compiler, slot, frame, unit)
        if self.whole:
            return base
        if self.layout.is_replica:
            base = self._replica(slot, base, unit)
        tile = self.region.block(frame, base).view()
        return tile if self.layout.is_replica else self._share(tile, unit.around(self.level.name))

    def _replica(self, slot: int, base: np.ndarray, unit: Unit) -> np.ndarray:
        holder = unit.around(self.level.name)
        owner = unit.owner(slot)
        version = owner.versions.get(slot, 0) if owner is not None else 0
        replica = holder.replicas.get(slot)
        if replica is None or replica.version != version:
            replica = holder.replicas[slot] = Replica(base.copy(), version)
        return replica.array

    def _share(self, tile: np.ndarray, unit: Unit) -> np.ndarray:
        axis, size = self.layout.axis(tile.ndim), unit.siblings
        share, block = tile.shape[axis] // size, self.layout.block
        if block is None or block == share:
            return tile[(slice(None),) * axis + (slice(unit.rank * share, (unit.rank + 1) * share),)]
        if block == 1:
            return tile[(slice(None),) * axis + (slice(unit.rank, None, size),)]
        raise UnsupportedError(
            f"a block-cyclic view (blocks of {block}) of a tile on chip: the emulator views whole or cyclic shares",
            hint="use blocks of one element or one contiguous share, or lay a tensor out this way at device level",
        )


@value_operation(VIEW.name)
def _view(compiler: Compiler, call: ir.Call) -> Closure:
    view = ViewOf(compiler, call)
    return lambda frame: Bound(view.resolve(frame, frame.unit))


def instance(compiler: Compiler, slot: int, frame: Frame, unit: Unit) -> Any:
    """The instance of a buffer that `unit`, another one than the frame's, sees."""
    if slot in compiler.views:
        return ViewOf(compiler, compiler.views[slot]).resolve(frame, unit)
    owner = unit.owner(slot)
    if owner is None:
        compiler.allocate([compiler.owned_buffer(slot)], unit, None)
        owner = unit
    return owner.storage[slot]
