# SPDX-License-Identifier: MIT
"""`T.Scale` regions and views: the units that run a region, and the part of a tile that each of them sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.programs import run_together
from tilescale.backends.emulator.execute.units import Replica, Unit
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.registry import value_operation
from tilescale.backends.emulator.interpret.selections import block_cyclic
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program.operations import Rank, TileView, operation
from tilescale.program.ops import ALL_OPS, RANK, VIEW


def compile_scale(compiler: Compiler, stmt: ir.AttrStmt) -> Closure:
    """A scale inside the grid. A finer level than the executing one forks; a coarser one only selects ranks."""
    level = compiler.machine.level(str(stmt.value.value))
    outer = compiler.executing
    executes = compiler.enters(level)
    compiler.scales.append(executes)
    vector = executes.kind == "thread_group" and executes.threads == 1 and not _works_on_tiles(stmt.body)
    saved, compiler.vector_level = compiler.vector_level, level.name if vector else compiler.vector_level
    body = compiler.stmt(stmt.body)
    compiler.vector_level = saved
    compiler.scales.pop()
    if vector or executes == outer:
        return body
    where = location(stmt)
    if executes.kind == "cluster":
        bound = _bound_in(compiler, stmt.body)
        return lambda frame: frame.program.cluster.execute(body, frame, bound, where)
    if executes.kind == "program":
        return lambda frame: frame.program.cluster.fork(body, frame, where)
    return _fork_groups(compiler, stmt, executes, body)


def _bound_in(compiler: Compiler, stmt: ir.Stmt) -> list[int]:
    """Slots of the variables that a statement binds."""
    bound = ir.instances(stmt, ir.For, ir.Bind)
    return [compiler.slot(node.loop_var if isinstance(node, ir.For) else node.var) for node in bound]


def _works_on_tiles(stmt: ir.Stmt) -> bool:
    def tile_operation(node: ir.Node) -> bool:
        name = ir.op_name(node) or ""
        return name.startswith(tl.TILE_OPERATIONS) or name in ALL_OPS - {RANK.name}

    return ir.contains(stmt, tile_operation)


def _fork_groups(compiler: Compiler, stmt: ir.AttrStmt, level: Level, body: Closure) -> Closure:
    owned = compiler.owned_by(level.name)
    replicated, bound = _replicas_in(compiler, stmt.body), _bound_in(compiler, stmt.body)
    # A replica of a unit's own view is copied back to the view. A replica of a tile from outside the region: unit 0's
    # becomes the tile.
    inner, outer = [s for s in replicated if s in bound], [s for s in replicated if s not in bound]
    where = location(stmt)

    def run(frame: Frame) -> None:
        frames = []
        for rank, span in enumerate(_spans(frame, level)):
            own = np.zeros(frame.threads, bool)
            own[span.start : span.stop] = True if frame.mask is None else frame.mask[span.start : span.stop]
            if own.any():
                unit = frame.unit.child(level.name, rank)
                unit.siblings = len(frame.span) // level.width
                side = frame.fork(unit, own)
                side.span = span
                compiler.allocate(owned, unit, side)
                frames.append(side)
        run_together(frame, lambda side: side.leave(body(side), side.own), frames, where)
        for side in frames:
            frame.join(side)
            for slot in inner:
                _fold_back(compiler, slot, side.unit, side)
        for slot in outer:
            _fold_back(compiler, slot, frames[0].unit, frame)

    return run


def _spans(frame: Frame, level: Level) -> list[range]:
    """The threads of each unit of a level inside the frame's unit."""
    step = level.width
    return [frame.span[i : i + step] for i in range(0, len(frame.span) - step + 1, step)]


def _fold_back(compiler: Compiler, slot: int, unit: Unit, frame: Frame) -> None:
    """Copy a unit's replica of a tile back to the tile, unless the tile was written since the replica was made."""
    replica = unit.replicas.get(slot)
    if replica is not None and replica.version == _version(compiler, slot, unit):
        np.copyto(frame.slots[slot], replica.array)
        for observer in frame.run.observers:
            observer.copies(replica.array, frame.slots[slot])


def _version(compiler: Compiler, slot: int, unit: Unit) -> int:
    root = compiler.root(slot)
    return unit.owner(root).versions.get(root, 0) if unit.has_owner(root) else 0


def _replicas_in(compiler: Compiler, stmt: ir.Stmt) -> list[int]:
    views = [view for view in map(operation, ir.nodes(stmt)) if isinstance(view, TileView)]
    return sorted({compiler.slot(view.base.data) for view in views if view.layout.is_replica})


@value_operation(RANK.name)
def _rank(compiler: Compiler, call: ir.Call) -> Closure:
    name = Rank.of(call).level
    if name == compiler.vector_level:
        return lambda frame: (np.arange(frame.threads, dtype=np.int32) - frame.span.start) % len(frame.span)
    return lambda frame: frame.unit.around(name).rank


# -- views -------------------------------------------------------------------------------------------------------------


class Bound:
    """A view's array, or selection, to be bound to a slot: not a value to copy."""

    def __init__(self, array: Any):
        self.array = array


class ViewOf:
    """A `T.view`: resolves to the array that a unit sees."""

    def __init__(self, compiler: Compiler, view: TileView):
        self.compiler, self.layout = compiler, view.layout
        self.level, self.region = compiler.machine.level(view.level), Region(compiler, view.region)
        self.whole = self.level.kind == "unit" and self.region.home.guarded

    def resolve(self, frame: Frame, unit: Unit) -> Any:
        """The part that `unit` sees; begins and extents are those of `frame`."""
        slot = self.region.home.slot
        base = frame.slots[slot] if unit is frame.unit else instance(self.compiler, slot, frame, unit)
        if self.whole:
            return base
        if self.layout.is_replica:
            base = self._replica(slot, base, unit, frame)
        tile = self.region.block(frame, base).view()
        return tile if self.layout.is_replica else self._share(tile, unit.around(self.level.name))

    def _replica(self, slot: int, base: np.ndarray, unit: Unit, frame: Frame) -> np.ndarray:
        holder = unit.around(self.level.name)
        version = _version(self.compiler, slot, unit)
        replica = holder.replicas.get(slot)
        if not self.compiler.data:
            return base
        if replica is None or replica.version != version:
            replica = holder.replicas[slot] = Replica(base.copy(), version)
            for observer in frame.run.observers:
                observer.copies(base, replica.array)
        return replica.array

    def _share(self, tile: Any, unit: Unit) -> Any:
        axis, size = self.layout.axis(tile.ndim), unit.siblings
        assert axis is not None, "a replica has been returned before"
        share, block = tile.shape[axis] // size, self.layout.block
        if block is None or block == share:
            return tile[(slice(None),) * axis + (slice(unit.rank * share, (unit.rank + 1) * share),)]
        if block == 1:
            return tile[(slice(None),) * axis + (slice(unit.rank, None, size),)]
        return block_cyclic(tile, axis, block, unit.rank, size)


@value_operation(VIEW.name)
def _view(compiler: Compiler, call: ir.Call) -> Closure:
    view = ViewOf(compiler, TileView.of(call))
    return lambda frame: Bound(view.resolve(frame, frame.unit))


def instance(compiler: Compiler, slot: int, frame: Frame, unit: Unit) -> Any:
    """The instance of a buffer that `unit`, which is not the frame's, sees."""
    if slot in compiler.views:
        return ViewOf(compiler, compiler.views[slot]).resolve(frame, unit)
    if not unit.has_owner(slot):
        buffer = compiler.owned_buffer(slot)
        compiler.allocate([buffer], unit.around(compiler.owner_level(buffer)), frame)
    return unit.owner(slot).storage[slot]
