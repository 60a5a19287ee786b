# SPDX-License-Identifier: MIT
"""Collectives that programs make on tiles: every device sends its part to each peer, all meet, each combines.

A workspace on every device has a slot for each sender, doubled: programs that are one collective ahead write the other
half, and nobody can be two ahead, because each collective is a meeting. Partial sums travel in the tile's type and are
added in the order of ranks in float32 (float64 for float64, the type itself for integers), so all devices get the same
bits.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.combine import fold, reduced
from tilescale.backends.cuda.lowering.implemented import ON_TILES
from tilescale.backends.cuda.lowering.lower import GridLowering, level_of, lowers
from tilescale.backends.cuda.lowering.peers import epochs, meet
from tilescale.collectives import TILES
from tilescale.program import ops
from tilescale.program.operations import Collective, Combine


class Tile:
    """A region argument: its buffer, where it begins, its constant extents without those of 1 that a slice adds."""

    def __init__(self, lowering: GridLowering, region: ir.Call):
        self.buffer, begins, extents = ir.region_parts(region)
        self.name, self.dtype = self.buffer.name, str(self.buffer.dtype)
        if self.buffer.scope() == "global":
            self.buffer = lowering.local(self.buffer.data)
        self.begins = [lowering.expr(b) for b in begins]
        known = ir.constants(lowering.expr(e) for e in extents)
        if known is None:
            raise lowering.unsupported(
                f"a collective on {self.name!r}, whose extents are symbolic, has no CUDA lowering"
            )
        self.extents = known

    @property
    def in_registers(self) -> bool:
        """Whether the tile is a fragment, of which a loop may only touch the whole: see `whole_loops`."""
        return bool(self.buffer.scope() == "local.fragment")

    def region(self, access: str, begins: list[Any] | None = None, extents: list[int] | None = None) -> ir.Call:
        """The tile, or a part of it, as an argument of a tile operation."""
        offset = [0] * len(self.begins) if begins is None else begins
        at = [b + o for b, o in zip(self.begins, offset, strict=True)]
        return tir.region(self.buffer, at, self.extents if extents is None else extents, access)

    def at(self, index: list[Any]) -> list[Any]:
        """Indices of an element of the tile in its buffer."""
        return [b + i for b, i in zip(self.begins, index, strict=True)]


class Exchange:
    """One collective of programs with the same index on all devices."""

    def __init__(self, lowering: GridLowering, call: ir.Call, part: list[int], dtype: str):
        level = level_of(lowering, call)
        name = f"T.{call.op.name.removeprefix('tilescale.')}"
        self.lowering, self.what = lowering, f"{name} of level {level.name!r}"
        self.part, self.dtype, self.devices = part, dtype, lowering.target.devices
        self.rank = lowering.rank(level.name)
        self.parity = ir.Var("parity", "int32")
        self.program = lowering.program_number()
        self.name = f"exchange{lowering.next_number()}"
        # One leading dimension for half, program and sender: a bulk copy has five dimensions at most.
        self.shape = (2 * lowering.programs() * self.devices, *part)
        lowering.notes.append(f"{self.what}: {ON_TILES[TILES][Collective.of(call).name]} through device memory")

    def _place(self, sender: Any) -> Any:
        """Where what `sender` sends lies in the workspace of its receiver."""
        return (self.parity * self.lowering.programs() + self.program) * self.devices + sender

    def begin(self) -> ir.Stmt:
        """Which half of the workspace this collective uses: all devices count the same meetings."""
        load = ir.BufferLoad(epochs(self.lowering), [self.program])
        return ir.Bind(self.parity, load % 2)

    def send(self, tile: ir.Call, peer: Any) -> ir.Stmt:
        """Copy a tile of the part's extents to a peer."""
        target = self.lowering.workspace_peers(self.name, self.shape, self.dtype)
        begins = [self.lowering.slot(peer), self._place(self.rank), *[0] * len(self.part)]
        # Plain stores: a bulk copy cannot take a part of a tile that is laid out as a whole.
        return tir.tile_call("copy", tile, tir.region(target, begins, [1, 1, *self.part], "w"), disable_tma=True)

    def send_parts(self, source: Tile, axis: int) -> list[ir.Stmt]:
        """Copy each part of a tile along an axis to the peer of its number."""
        part, begins = parts(source, axis, self.devices)
        if not source.in_registers:
            return [self.send(source.region("r", begin, part), peer) for peer, begin in enumerate(begins)]
        target = self.lowering.workspace_peers(self.name, self.shape, self.dtype)
        loops, peer, index = whole_loops(source, axis, part)
        place = [self.lowering.slot(peer), self._place(self.rank), *index]
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

    def meet(self) -> ir.Stmt:
        """Everybody's parts are here."""
        return meet(self.lowering, self.what)

    def received(self, sender: Any, index: list[Any]) -> ir.PrimExpr:
        """An element of what a device sent here."""
        here = self.lowering.workspace(self.name, self.shape, self.dtype)
        return ir.BufferLoad(here, [self._place(sender), *index])

    def take(self, sender: Any, tile: ir.Call) -> ir.Stmt:
        """Copy what a device sent here into a tile."""
        here = self.lowering.workspace(self.name, self.shape, self.dtype)
        begins = [self._place(sender), *[0] * len(self.part)]
        return tir.tile_call("copy", tir.region(here, begins, [1, *self.part], "r"), tile)

    def combined(self, target: Tile, op: str) -> ir.Stmt:
        """target = the combination of what all devices sent."""
        loops = [ir.Var(f"i{axis}", "int32") for axis in range(len(self.part))]
        values = [self.received(sender, loops) for sender in range(self.devices)]
        total = reduced(values, op, self.dtype, target.dtype)
        return tir.parallel(loops, self.part, ir.BufferStore(target.buffer, total, target.at(loops)))


@lowers(ops.ALLREDUCE)
def _allreduce(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    if made.combine is not None:
        return _allreduce_function(lowering, call, made.combine)
    tile = Tile(lowering, made.target)
    exchange = Exchange(lowering, call, tile.extents, tile.dtype)
    sends = [exchange.send(tile.region("r"), peer) for peer in range(exchange.devices)]
    return tir.sequence([exchange.begin(), *sends, exchange.meet(), exchange.combined(tile, made.reduction)])


def _allreduce_function(lowering: GridLowering, call: ir.Call, combine: Combine) -> ir.Stmt:
    """With the user's combination: a fold over the ranks, in a loop nest for each tile."""
    made = Collective.of(call)
    tiles = [Tile(lowering, region) for region in made.tiles]
    exchanges = [Exchange(lowering, call, tile.extents, tile.dtype) for tile in tiles]
    devices = exchanges[0].devices
    for other in exchanges[1:]:
        other.parity = exchanges[0].parity
    sends = [e.send(t.region("r"), peer) for e, t in zip(exchanges, tiles, strict=True) for peer in range(devices)]
    folds = [fold(lowering, combine, which, tiles, exchanges) for which in range(len(tiles))]
    return tir.sequence([exchanges[0].begin(), *sends, exchanges[0].meet(), *folds])


def parts(whole: Tile, axis: int, devices: int) -> tuple[list[int], list[list[int]]]:
    """Extents of one of the parts along an axis, and where each begins."""
    part = [n // devices if a == axis else n for a, n in enumerate(whole.extents)]
    return part, [[i * part[a] if a == axis else 0 for a in range(len(part))] for i in range(devices)]


def whole_loops(tile: Tile, axis: int, part: list[int]) -> tuple[list[ir.Var], Any, list[Any]]:
    """Loops over all of a tile, the number of the part along an axis that an element is in, and its indices there.

    Stock's layout inference takes a loop over a part of a fragment for one over the whole, and gives the fragment too
    few registers.
    """
    loops = [ir.Var(f"i{a}", "int32") for a in range(len(part))]
    index = [i % part[axis] if a == axis else i for a, i in enumerate(loops)]
    return loops, loops[axis] // part[axis], index


@lowers(ops.REDUCE_SCATTER)
def _reduce_scatter(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    source, target, axis = Tile(lowering, made.source), Tile(lowering, made.target), made.axis
    part, _ = parts(source, axis, lowering.target.devices)
    exchange = Exchange(lowering, call, part, source.dtype)
    sends = exchange.send_parts(source, axis)
    return tir.sequence([exchange.begin(), *sends, exchange.meet(), exchange.combined(target, made.reduction)])


@lowers(ops.ALL_GATHER)
def _all_gather(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    if made.is_in_place:
        raise lowering.unsupported("T.all_gather of a view has no CUDA lowering")
    source, target, axis = Tile(lowering, made.source), Tile(lowering, made.target), made.axis
    part, _ = parts(target, axis, lowering.target.devices)
    exchange = Exchange(lowering, call, part, source.dtype)
    sends = [exchange.send(source.region("r"), peer) for peer in range(exchange.devices)]
    return tir.sequence([exchange.begin(), *sends, exchange.meet(), *exchange.take_parts(target, axis)])


@lowers(ops.ALL_TO_ALL)
def _all_to_all(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    source, target, axis = Tile(lowering, made.source), Tile(lowering, made.target), made.axis
    part, _ = parts(source, axis, lowering.target.devices)
    exchange = Exchange(lowering, call, part, source.dtype)
    sends = exchange.send_parts(source, axis)
    return tir.sequence([exchange.begin(), *sends, exchange.meet(), *exchange.take_parts(target, axis)])


@lowers(ops.BROADCAST)
def _broadcast(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    tile = Tile(lowering, made.target)
    exchange = Exchange(lowering, call, tile.extents, tile.dtype)
    root = lowering.expr(made.root)
    sends = tir.sequence([exchange.send(tile.region("r"), peer) for peer in range(exchange.devices)])
    is_root = exchange.rank == root
    mine = ir.IfThenElse(is_root.asobject() if hasattr(is_root, "asobject") else is_root, sends, None)
    return tir.sequence([exchange.begin(), mine, exchange.meet(), exchange.take(root, tile.region("w"))])
