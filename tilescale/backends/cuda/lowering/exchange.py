# SPDX-License-Identifier: MIT
"""Collectives that programs make on tiles: every device sends its part to each peer, all meet, each combines.

A workspace on every device has a slot for each sender, doubled: programs that are one collective ahead write the other
half, and nobody can be two ahead, because each collective is a barrier. Partial sums travel in the tile's type and are
added in the order of ranks in float32 (float64 for float64, the type itself for integers), so all devices get the same
bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.combine import fold, reduced
from tilescale.backends.cuda.lowering.devices import DeviceStage
from tilescale.backends.cuda.lowering.implemented import ON_TILES
from tilescale.backends.cuda.lowering.registry import lowers
from tilescale.backends.cuda.lowering.signals import barrier, epochs
from tilescale.backends.cuda.lowering.tile import Tile, parts, whole_loops
from tilescale.collectives import TILES
from tilescale.program import ops
from tilescale.program.operations import Collective, Combine


def tile_of(stage: DeviceStage, region: ir.Call) -> Tile:
    """A tile argument, on this device.

    Raises:
        UnsupportedError: its extents are symbolic.
    """
    buffer, _, _ = ir.region_parts(region)
    here = stage.local(buffer.data) if buffer.scope() == "global" else buffer
    tile = replace(Tile.of(region, stage.expr), buffer=here)
    if not tile.is_static:
        raise stage.unsupported(f"a collective on {tile.name!r}, whose extents are symbolic, has no CUDA lowering")
    return tile


class Exchange:
    """One collective of programs with the same index on all devices."""

    def __init__(self, stage: DeviceStage, call: ir.Call, part: list[int], dtype: str):
        level = stage.level_of(call)
        name = f"T.{call.op.name.removeprefix('tilescale.')}"
        self.stage, self.what = stage, f"{name} of level {level.name!r}"
        self.part, self.dtype, self.devices = part, dtype, stage.target.devices
        self.rank = stage.rank(level.name)
        self.parity = ir.Var("parity", "int32")
        self.program = stage.program_number()
        self.name = f"exchange{stage.next_number()}"
        # One leading dimension for half, program and sender: a bulk copy has five dimensions at most.
        self.shape = (2 * stage.programs() * self.devices, *part)
        stage.notes.append(f"{self.what}: {ON_TILES[TILES][Collective.of(call).name]} through device memory")

    def _place(self, sender: Any) -> Any:
        """Where what `sender` sends lies in the workspace of its receiver."""
        return (self.parity * self.stage.programs() + self.program) * self.devices + sender

    def begin(self) -> ir.Stmt:
        """Which half of the workspace this collective uses: all devices count the same barriers."""
        load = ir.BufferLoad(epochs(self.stage), [self.program])
        return ir.Bind(self.parity, load % 2)

    def send(self, tile: ir.Call, peer: Any) -> ir.Stmt:
        """Copy a tile of the part's extents to a peer."""
        target = self.stage.workspace_peers(self.name, self.shape, self.dtype)
        begins = [self.stage.slot(peer), self._place(self.rank), *[0] * len(self.part)]
        # Plain stores: a bulk copy cannot take a part of a tile that is laid out as a whole.
        return tir.tile_call("copy", tile, tir.region(target, begins, [1, 1, *self.part], "w"), disable_tma=True)

    def send_parts(self, source: Tile, axis: int) -> list[ir.Stmt]:
        """Copy each part of a tile along an axis to the peer of its number."""
        part, begins = parts(source, axis, self.devices)
        if not source.in_registers:
            return [self.send(source.region("r", begin, part), peer) for peer, begin in enumerate(begins)]
        target = self.stage.workspace_peers(self.name, self.shape, self.dtype)
        loops, peer, index = whole_loops(source, axis, part)
        place = [self.stage.slot(peer), self._place(self.rank), *index]
        value = ir.BufferLoad(source.buffer, source.at(loops))
        return [tir.parallel(loops, source.extents, ir.BufferStore(target, value, place))]

    def take_parts(self, target: Tile, axis: int) -> list[ir.Stmt]:
        """Copy what the devices sent here into the parts of a tile along an axis."""
        part, begins = parts(target, axis, self.devices)
        if not target.in_registers:
            return [self.take(sender, target.region("w", begin, part)) for sender, begin in enumerate(begins)]
        loops, sender, index = whole_loops(target, axis, part)
        value = self.received(sender, index)
        value = ir.Cast(target.dtype, value) if target.dtype != self.dtype else value
        return [tir.parallel(loops, target.extents, ir.BufferStore(target.buffer, value, target.at(loops)))]

    def barrier(self) -> ir.Stmt:
        """Everybody's parts are here."""
        return barrier(self.stage, self.what)

    def received(self, sender: Any, index: list[Any]) -> ir.PrimExpr:
        """An element of what a device sent here."""
        here = self.stage.workspace(self.name, self.shape, self.dtype)
        return ir.BufferLoad(here, [self._place(sender), *index])

    def take(self, sender: Any, tile: ir.Call) -> ir.Stmt:
        """Copy what a device sent here into a tile."""
        here = self.stage.workspace(self.name, self.shape, self.dtype)
        begins = [self._place(sender), *[0] * len(self.part)]
        return tir.tile_call("copy", tir.region(here, begins, [1, *self.part], "r"), tile)

    def combined(self, target: Tile, op: str) -> ir.Stmt:
        """target = the combination of what all devices sent."""
        loops = [ir.Var(f"i{axis}", "int32") for axis in range(len(self.part))]
        values = [self.received(sender, loops) for sender in range(self.devices)]
        total = reduced(values, op, self.dtype, target.dtype)
        return tir.parallel(loops, self.part, ir.BufferStore(target.buffer, total, target.at(loops)))


@lowers(ops.ALLREDUCE.name, impl="one_shot")
def _allreduce(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    if made.combine is not None:
        return _allreduce_function(stage, call, made.combine)
    tile = tile_of(stage, made.target)
    exchange = Exchange(stage, call, tile.extents, tile.dtype)
    sends = [exchange.send(tile.region("r"), peer) for peer in range(exchange.devices)]
    return tir.sequence([exchange.begin(), *sends, exchange.barrier(), exchange.combined(tile, made.reduction)])


def _allreduce_function(stage: DeviceStage, call: ir.Call, combine: Combine) -> ir.Stmt:
    """With the user's combination: a fold over the ranks, in a loop nest for each tile."""
    made = Collective.of(call)
    tiles = [tile_of(stage, region) for region in made.tiles]
    exchanges = [Exchange(stage, call, tile.extents, tile.dtype) for tile in tiles]
    devices = exchanges[0].devices
    for other in exchanges[1:]:
        other.parity = exchanges[0].parity
    sends = [e.send(t.region("r"), peer) for e, t in zip(exchanges, tiles, strict=True) for peer in range(devices)]
    folds = [fold(stage, combine, which, tiles, exchanges) for which in range(len(tiles))]
    return tir.sequence([exchanges[0].begin(), *sends, exchanges[0].barrier(), *folds])


@lowers(ops.REDUCE_SCATTER.name, impl="direct")
def _reduce_scatter(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    part, _ = parts(source, axis, stage.target.devices)
    exchange = Exchange(stage, call, part, source.dtype)
    sends = exchange.send_parts(source, axis)
    return tir.sequence([exchange.begin(), *sends, exchange.barrier(), exchange.combined(target, made.reduction)])


@lowers(ops.ALL_GATHER.name, impl="direct")
def _all_gather(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    if made.is_in_place:
        raise stage.unsupported("T.all_gather of a view has no CUDA lowering")
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    part, _ = parts(target, axis, stage.target.devices)
    exchange = Exchange(stage, call, part, source.dtype)
    sends = [exchange.send(source.region("r"), peer) for peer in range(exchange.devices)]
    return tir.sequence([exchange.begin(), *sends, exchange.barrier(), *exchange.take_parts(target, axis)])


@lowers(ops.ALL_TO_ALL.name, impl="direct")
def _all_to_all(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    part, _ = parts(source, axis, stage.target.devices)
    exchange = Exchange(stage, call, part, source.dtype)
    sends = exchange.send_parts(source, axis)
    return tir.sequence([exchange.begin(), *sends, exchange.barrier(), *exchange.take_parts(target, axis)])


@lowers(ops.BROADCAST.name, impl="direct")
def _broadcast(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    tile = tile_of(stage, made.target)
    exchange = Exchange(stage, call, tile.extents, tile.dtype)
    root = stage.expr(made.root)
    sends = tir.sequence([exchange.send(tile.region("r"), peer) for peer in range(exchange.devices)])
    is_root = exchange.rank == root
    mine = ir.IfThenElse(is_root.asobject() if hasattr(is_root, "asobject") else is_root, sends, None)
    return tir.sequence([exchange.begin(), mine, exchange.barrier(), exchange.take(root, tile.region("w"))])
