# SPDX-License-Identifier: MIT
"""Collectives of programs on tiles: every device sends its part to each peer, all synchronize, each combines.

A workspace on every device has a slot for each sender, for each resident program (workspace_slots.py), double-buffered:
programs that are one collective ahead write the other half, and none can be two ahead, because each collective is a
barrier.
Partial sums are sent in the tile's type and added in the order of ranks in float32 (float64 for float64, the type
itself for integers), so all devices get the same bits. Between devices that do not all share memory, NVSHMEM puts parts
that have been laid out in a local workspace: by peer memory inside a node, over the network to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering import tile_messages
from tilescale.backends.tilelang.lowering.combine import fold, reduced
from tilescale.backends.tilelang.lowering.copies import nvshmem
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.implemented import ON_TILES
from tilescale.backends.tilelang.lowering.markers import by_nvshmem
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.signals import barrier, epochs
from tilescale.backends.tilelang.lowering.tile import TileRegion, parts, take_parts, whole_loops
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.collectives import TILES
from tilescale.program import ops
from tilescale.program.effects import names_of
from tilescale.program.footprint import stages_of, tile_bytes
from tilescale.program.model import bytes_of
from tilescale.program.operations import Collective, Combine

WIDE = 16
"""Maximum bytes of a thread's load or store."""

AT_ONCE = 8
"""Loads or stores of a thread of a communication warpgroup between two iterations of a loop: stock TileLang unrolls all
of a tile's, which take more registers than the warpgroup has."""


def tile_of(stage: DeviceStage, region: ir.Call) -> TileRegion:
    """A tile argument, on this device. Raises UnsupportedError: its extents are symbolic."""
    buffer, _, _ = ir.region_parts(region)
    here = stage.local(buffer.data) if buffer.scope() == "global" else buffer
    tile = replace(TileRegion.of(region, stage.expr), buffer=here)
    if not tile.is_static:
        raise stage.unsupported(f"a collective on {tile.name!r}, whose extents are symbolic, has no CUDA lowering")
    return tile


def siblings(stage: DeviceStage, made: Collective) -> int:
    """Number of participants."""
    return dict(stage.target.sizes)[made.level]


def stored(tile: ir.Call, space: ir.Buffer, begins: Sequence[Any], extents: Sequence[int]) -> ir.Stmt:
    """A tile in a workspace. By plain stores: a bulk copy cannot take a part of a tile that has a layout as a whole."""
    return tir.tile_call("copy", tile, tir.region(space, begins, extents, "w"), disable_tma=True)


def when(condition: ir.PrimExpr, body: ir.Stmt) -> ir.Stmt:
    """A statement that is executed if a comparison holds."""
    return ir.IfThenElse(condition.asobject() if hasattr(condition, "asobject") else condition, body, None)


class TileExchange:
    """One collective of programs with the same index on all siblings of a level."""

    def __init__(self, stage: DeviceStage, call: ir.Call, part: list[int], dtype: str):
        level = stage.level_of(call)
        name = f"T.{call.op.name.removeprefix('tilescale.')}"
        self.stage, self.what = stage, f"{name} of level {level.name!r}"
        self.part, self.dtype, self.level = part, dtype, level.name
        self.devices = dict(stage.target.sizes)[level.name]
        self.rank = stage.rank(level.name)
        self.far = by_nvshmem(call)
        self.parity = ir.Var("parity", "int32")
        self.program = stage.place()
        self.name = f"exchange{stage.next_number()}"
        # One leading dimension for half, program and sender: a bulk copy has five dimensions at most.
        self.shape = (2 * stage.window * self.devices, *part)
        through = f"{IMPL}, as {level.name}s do not all share memory" if self.far else "device memory"
        shared = f", {stage.window} slots that programs use one after another" if stage.is_shared else ""
        stage.notes.append(f"{self.what}: {ON_TILES[TILES][Collective.of(call).name]} through {through}{shared}")

    def _place(self, sender: Any) -> Any:
        """The position of `sender`'s part in its receiver's workspace. The remainder proves it in bounds."""
        return (self.parity % 2 * self.stage.window + self.program) * self.devices + sender

    def staged(self, tile: TileRegion) -> tuple[list[ir.Stmt], TileRegion]:
        """A tile in its form for sending, and the statements before.

        A thread has a few neighbouring elements of a tile in registers. Sent from registers, packets are mostly
        headers; through shared memory whole rows are sent, 16 bytes a thread.
        """
        least = WIDE * self.stage.launch.thread_count
        if not tile.in_registers or (bytes_of(tile.extents, tile.dtype) or 0) < least or not self.has_room(tile):
            return [], tile
        return self.dense(tile)

    def dense(self, tile: TileRegion) -> tuple[list[ir.Stmt], TileRegion]:
        """A tile in shared memory of its own, and the statements before."""
        buffer = tir.local_buffer(f"{self.name}_staged", tile.extents, tile.dtype, "shared.dyn")
        self.stage.tiles.append(buffer)
        dense = TileRegion.whole(buffer)
        return [tir.tile_call("copy", tile.region("r"), dense.region("w"))], dense

    def has_room(self, tile: TileRegion) -> bool:
        """Whether the program may have such a tile in shared memory, in addition to pipelines."""
        stage, machine = self.stage, self.stage.target.machine
        nbytes = bytes_of(tile.extents, tile.dtype) or 0
        depth = max([1, *map(stages_of, ir.instances(stage.phase.stmt, ir.For))])
        names = names_of(stage.phase.program)
        taken = depth * sum(tile_bytes(machine, stage.launch, names, ir.SHARED).values())
        room = machine.capacity(machine.layer_for("shared").name)
        return stage.executing is None and nbytes <= room - taken

    def begin(self) -> ir.Stmt:
        """Select the half of the workspace: all devices count the same barriers."""
        load = ir.BufferLoad(epochs(self.stage, self.level), [self.program])
        return ir.Bind(self.parity, load % 2)

    def _slot(self, peer: Any) -> ir.PrimExpr:
        return self.stage.slot(self.stage.device_number(self.level, peer))

    def send(self, tile: TileRegion) -> list[ir.Stmt]:
        """Copy a tile of the part's extents to every peer."""
        if self.far:
            return [stored(tile.region("r"), *self._sent(1, 0)), *self._put(lambda peer: 0, 1)]
        return [self._send_tile(tile, peer) for peer in self._rotated_peers()]

    def _send_tile(self, tile: TileRegion, peer: Any) -> ir.Stmt:
        def piece(begins: list[Any], extents: list[int]) -> ir.Stmt:
            target = self.stage.workspace_peers(self.name, self.shape, self.dtype)
            where = [self._slot(peer), self._place(self.rank % self.devices), *begins]
            return stored(tile.region("r", begins, extents), target, where, [1, 1, *extents])

        return self._in_pieces(tile, piece)

    def _in_pieces(self, tile: TileRegion, made: Callable[[list[Any], list[int]], ir.Stmt]) -> ir.Stmt:
        """A statement about a tile, split into pieces for which threads have registers."""
        unit, rows = self.stage.executing, tile.extents[0]
        pieces, rest = 1, [0] * (len(tile.extents) - 1)
        if unit is not None and not tile.in_registers:
            needed = (bytes_of(tile.extents, tile.dtype) or 0) // (unit.threads * WIDE * AT_ONCE)
            pieces = next(n for n in range(1, rows + 1) if rows % n == 0 and n >= min(needed, rows))
        if pieces == 1:
            return made([0, *rest], tile.extents)
        number = ir.Var("piece", "int32")
        stmt = made([number * (rows // pieces), *rest], [rows // pieces, *tile.extents[1:]])
        return ir.For(number, ir.IntImm("int32", 0), ir.IntImm("int32", pieces), ir.ForKind.SERIAL, stmt)

    def _rotated_peers(self) -> list[Any]:
        """All devices, the next one first and this one last: no two begin with the same."""
        return [(self.rank + step) % self.devices for step in range(1, self.devices + 1)]

    def _send(self, tile: ir.Call, peer: Any) -> ir.Stmt:
        target = self.stage.workspace_peers(self.name, self.shape, self.dtype)
        begins = [self._slot(peer), self._place(self.rank % self.devices), *[0] * len(self.part)]
        return stored(tile, target, begins, [1, 1, *self.part])

    def _sent(self, parts: int, number: Any) -> tuple[ir.Buffer, list[Any], list[int]]:
        """The position of an outgoing part among `parts` of a program: a workspace, its begins and extents."""
        space = self.stage.workspace(f"{self.name}_sent", (self.stage.window * parts, *self.part), self.dtype)
        return space, [self.program * parts + number, *[0] * len(self.part)], [1, *self.part]

    def _put(self, number: Callable[[int], Any], parts: int) -> list[ir.Stmt]:
        """Put part `number` of `parts` to each peer, and wait for completion."""
        stage = self.stage
        stage.call_nvshmem()
        stage.ordered = True  # all threads of a program synchronize for each call
        here = stage.workspace(self.name, self.shape, self.dtype)
        place = [self._place(self.rank % self.devices), *[0] * len(self.part)]
        moves = []
        for peer in range(self.devices):
            sent = nvshmem.StridedTile.of(*self._sent(parts, number(peer)))
            received = nvshmem.StridedTile.of(here, place, [1, *self.part])
            pe = stage.device_number(self.level, peer) % stage.target.devices
            moves.append(nvshmem.put_part(sent, received, pe))
        return [*moves, nvshmem.complete()]

    def send_parts(self, source: TileRegion, axis: int) -> list[ir.Stmt]:
        """Copy each part of a tile along an axis to its peer."""
        put = self._put(lambda peer: peer, self.devices) if self.far else []
        part, _ = parts(source, axis, self.devices)
        if not source.in_registers:

            def of(peer: Any) -> ir.Call:
                begin = [peer * extent if a == axis else 0 for a, extent in enumerate(part)]
                return source.region("r", begin, part)

            if self.far:
                return [*(stored(of(peer), *self._sent(self.devices, peer)) for peer in range(self.devices)), *put]
            return [self._send(of(peer), peer) for peer in self._rotated_peers()]
        loops, peer, index = whole_loops(axis, part)
        value = ir.BufferLoad(source.buffer, source.at(loops))
        if self.far:
            target, (number, *_), _ = self._sent(self.devices, peer)
            place = [number, *index]
        else:
            target = self.stage.workspace_peers(self.name, self.shape, self.dtype)
            place = [self._slot(peer), self._place(self.rank % self.devices), *index]
        return [tir.parallel(loops, source.extents, ir.BufferStore(target, value, place)), *put]

    def take_parts(self, target: TileRegion, axis: int) -> list[ir.Stmt]:
        """Copy the received parts into the parts of a tile along an axis."""
        return take_parts(target, axis, self.devices, self.received, self.take)

    def barrier(self) -> ir.Stmt:
        """Wait for the parts of all devices."""
        return barrier(self.stage, self.what, self.level)

    def received(self, sender: Any, index: list[Any]) -> ir.PrimExpr:
        here = self.stage.workspace(self.name, self.shape, self.dtype)
        return ir.BufferLoad(here, [self._place(sender), *index])

    def take(self, sender: Any, tile: ir.Call) -> ir.Stmt:
        """Copy a received tile into a tile."""
        here = self.stage.workspace(self.name, self.shape, self.dtype)
        begins = [self._place(sender), *[0] * len(self.part)]
        return tir.tile_call("copy", tir.region(here, begins, [1, *self.part], "r"), tile)

    def combined(self, target: TileRegion, op: str) -> ir.Stmt:
        """target = the combination of all received tiles."""

        def piece(begins: list[Any], extents: list[int]) -> ir.Stmt:
            loops = tir.loop_variables(extents)
            at = [begin + loop for begin, loop in zip(begins, loops, strict=True)]
            values = [self.received(sender, at) for sender in range(self.devices)]
            total = reduced(values, op, self.dtype, target.dtype)
            return tir.parallel(loops, extents, ir.BufferStore(target.buffer, total, target.at(at)))

        return self._in_pieces(target, piece)


@lowers(ops.ALLREDUCE.name, impl="one_shot")
def _allreduce(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    if made.combine is not None:
        return _allreduce_function(stage, call, made.combine)
    tile = tile_of(stage, made.target)
    exchange = TileExchange(stage, call, tile.extents, tile.dtype)
    is_ready = tile_messages.is_dense(stage, tile)
    by_words = tile_messages.is_able(stage, made, tile) and (is_ready or exchange.has_room(tile))
    before, dense = exchange.dense(tile) if by_words and not is_ready else exchange.staged(tile)
    back = [] if dense is tile else [tir.tile_call("copy", dense.region("r"), tile.region("w"))]
    if by_words:
        summed = tile_messages.reduced(stage, exchange.what, made, dense, exchange.name)
        return tir.sequence([*before, *summed, *back])
    added = exchange.combined(dense, made.reduction)
    return tir.sequence([*before, exchange.begin(), *exchange.send(dense), exchange.barrier(), added, *back])


def _allreduce_function(stage: DeviceStage, call: ir.Call, combine: Combine) -> ir.Stmt:
    """The user's combination: a fold over the ranks, in a loop nest for each tile."""
    made = Collective.of(call)
    tiles = [tile_of(stage, region) for region in made.tiles]
    exchanges = [TileExchange(stage, call, tile.extents, tile.dtype) for tile in tiles]
    for other in exchanges[1:]:
        other.parity = exchanges[0].parity
    sends = [sent for e, t in zip(exchanges, tiles, strict=True) for sent in e.send(t)]
    folds = [fold(stage.unsupported, combine, which, tiles, exchanges) for which in range(len(tiles))]
    return tir.sequence([exchanges[0].begin(), *sends, exchanges[0].barrier(), *folds])


@lowers(ops.REDUCE_SCATTER.name, impl="direct")
def _reduce_scatter(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    exchange, sends = _sent_parts(stage, call, made)
    return tir.sequence([*sends, exchange.combined(tile_of(stage, made.target), made.reduction)])


def _sent_parts(stage: DeviceStage, call: ir.Call, made: Collective) -> tuple[TileExchange, list[ir.Stmt]]:
    """An exchange in which every device sends each one its part of the source, up to its barrier."""
    source = tile_of(stage, made.source)
    part, _ = parts(source, made.axis, siblings(stage, made))
    exchange = TileExchange(stage, call, part, source.dtype)
    before, dense = exchange.staged(source)
    return exchange, [*before, exchange.begin(), *exchange.send_parts(dense, made.axis), exchange.barrier()]


@lowers(ops.ALL_GATHER.name, impl="direct")
def _all_gather(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    if made.is_in_place:
        raise stage.unsupported("T.all_gather of a view has no CUDA lowering")
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    part, _ = parts(target, axis, siblings(stage, made))
    exchange = TileExchange(stage, call, part, source.dtype)
    before, dense = exchange.staged(source)
    sends = exchange.send(dense)
    return tir.sequence([*before, exchange.begin(), *sends, exchange.barrier(), *exchange.take_parts(target, axis)])


@lowers(ops.ALL_TO_ALL.name, impl="direct")
def _all_to_all(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    exchange, sends = _sent_parts(stage, call, made)
    return tir.sequence([*sends, *exchange.take_parts(tile_of(stage, made.target), made.axis)])


@lowers(ops.BROADCAST.name, impl="direct")
def _broadcast(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    tile = tile_of(stage, made.target)
    exchange = TileExchange(stage, call, tile.extents, tile.dtype)
    root = stage.expr(made.root)
    before, dense = exchange.staged(tile)
    sends = when(exchange.rank == root, tir.sequence(exchange.send(dense)))
    return tir.sequence([*before, exchange.begin(), sends, exchange.barrier(), exchange.take(root, tile.region("w"))])
