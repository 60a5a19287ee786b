# SPDX-License-Identifier: MIT
"""Copies between devices by NVSHMEM: where they share no memory, or a program requests it with `impl="nvshmem"`.

Why: NVSHMEM names a peer by its number and a location by this device's address, so it also reaches devices without an
address here. Before: a remote tile copy. After: a call of headers/nvshmem.cuh that moves rows between symmetric memory
here and there. An on-chip tile, or one of another type, goes through a symmetric workspace: network adapters reach
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.signals import SignalUpdate
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.program import ops
from tilescale.program.operations import Copy

Number: TypeAlias = int | ir.PrimExpr
"""A constant, or an expression of 64 bits."""


@dataclass(frozen=True)
class TileAxis:
    """One axis of a tile: its begin and extent, the tensor's size, and elements from index to index."""

    begin: Number
    extent: int
    size: Number
    stride: Number

    @property
    def whole(self) -> bool:
        """Whether the tile spans the whole tensor along this axis."""
        return ir.constant(self.begin) == 0 and ir.constant(self.size) == self.extent


ONE = TileAxis(0, 1, 1, 0)


@dataclass(frozen=True)
class StridedTile:
    """One end of a copy: in symmetric memory of this device, or at the same address on a peer.

    Attributes:
        axes: the axes with more than one element.
        offset: number of elements before it, from its indices on the other axes.
        present: whether these indices lie in the tensor; None if they are known to.
    """

    buffer: ir.Buffer
    axes: tuple[TileAxis, ...]
    offset: Number = 0
    present: ir.PrimExpr | None = None

    @classmethod
    def of(cls, buffer: ir.Buffer, begins: Sequence[Any], extents: Sequence[int]) -> StridedTile:
        """The tile of a region of a dense tensor."""
        axes: list[TileAxis] = []
        stride: Number = 1
        for begin, extent, size in reversed(list(zip(begins, extents, buffer.shape, strict=True))):
            axes.insert(0, TileAxis(_number(begin), extent, _number(size), stride))
            stride = _number(size) * stride
        tile = cls(buffer, tuple(axis for axis in axes if axis.extent != 1))
        for axis in axes:
            if axis.extent == 1:
                tile = tile.at(axis, 0)
        return tile

    def at(self, axis: TileAxis, index: Any) -> StridedTile:
        """The tile at one index of one of its axes."""
        position, present = axis.begin + _number(index), self.present
        value, size = ir.constant(position), ir.constant(axis.size)
        if value is None or size is None or not 0 <= value < size:
            inside = ir.And(ir.GE(_int64(position), _int64(0)), ir.LT(_int64(position), _int64(axis.size)))
            present = inside if present is None else ir.And(present, inside)
        return replace(self, offset=self.offset + position * axis.stride, present=present)

    def place(self, rows: TileAxis, columns: TileAxis) -> ir.PrimExpr:
        """Its arguments of the device functions."""
        size = _int64(rows.size)
        if self.present is not None:
            size = ir.Select(self.present, size, _int64(0))
        numbers = (self.offset, rows.stride, rows.begin, size, columns.begin, columns.size)
        return tir.extern("tilescale::place", tir.address_of(self.buffer), *map(_int64, numbers))


def _number(expr: ir.PrimExpr) -> Number:
    value = ir.constant(expr)
    return ir.Cast("int64", expr) if value is None else value


def _int64(number: Number) -> ir.PrimExpr:
    return ir.IntImm("int64", number) if isinstance(number, int) else number


@lowers(ops.COPY.name, impl=IMPL)
def _copy(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    asked = Copy.of(call)
    if stage.executing is not None:
        raise stage.unsupported(f"T.copy by {IMPL}, of units inside a program, has no CUDA lowering: the whole program")
    peer = stage.device_number(asked.level, stage.expr(asked.peer)) % stage.target.devices
    update = None
    if asked.signal is not None:
        update = SignalUpdate.of(stage, "T.copy(signal={})", asked.signal, asked.op, asked.value)
    there = _symmetric(stage, asked.far)
    here, staging = _reachable(stage, stage.expr(asked.near), asked.near, there, asked.to_peer)
    stage.call_nvshmem()
    stage.ordered = True  # all threads of a program synchronize for each call
    names = [ir.region_parts(region)[0].name.removesuffix("_view") for region in (asked.near, asked.far)]
    why = "asked for" if asked.impl == IMPL else f"{asked.level}s share no memory"
    through = ", through a workspace" if staging else ""
    side = "dst" if asked.to_peer else "src"
    stage.notes.append(f"T.copy({', '.join(names)}, {side}=): {IMPL} ({why}{through})")
    moves = _moves(here, there, asked.to_peer, peer, update)
    return tir.sequence([*staging, *moves] if asked.to_peer else [*moves, *staging])


def put_part(sent: StridedTile, received: StridedTile, pe: Any) -> ir.Stmt:
    """Start to put a part of one workspace into another one on device `pe`; `complete` ends it."""
    return tir.sequence(_moves(sent, received, True, pe, None, put="tilescale::start_put"))


def complete() -> ir.Stmt:
    """Complete all operations that the program has started."""
    return tir.evaluate(tir.extern("tilescale::complete"))


def _symmetric(stage: DeviceStage, region: ir.Call) -> StridedTile:
    """A tile of a tensor, which must be symmetric."""
    buffer, begins, _ = ir.region_parts(region)
    return StridedTile.of(stage.symmetric(buffer.data), [stage.expr(b) for b in begins], _extents(stage, region))


def _extents(stage: DeviceStage, region: ir.Call) -> list[int]:
    buffer, _, extents = ir.region_parts(region)
    sizes = ir.constants(stage.expr(n) for n in extents)
    if sizes is None:
        raise stage.unsupported(f"T.copy(impl={IMPL!r}) of {buffer.name!r}, whose extents are symbolic,")
    if ir.bits(str(buffer.dtype)) % 8:
        raise stage.unsupported(f"T.copy(impl={IMPL!r}) of {buffer.name!r}, whose elements are {buffer.dtype},")
    return sizes


def _reachable(
    stage: DeviceStage, lowered: ir.Call, near: ir.Call, there: StridedTile, to_peer: bool
) -> tuple[StridedTile, list[ir.Stmt]]:
    """The near tile in symmetric memory; and the copies to or from there, if it lies elsewhere."""
    buffer, dtype = ir.region_parts(near)[0], str(there.buffer.dtype)
    if buffer.scope() == "global" and str(buffer.dtype) == dtype:
        return _symmetric(stage, near), []
    extents = _extents(stage, near)
    # Puts and gets have their own workspaces: one must not overwrite a tile that threads still read.
    name = "_".join(["sent" if to_peer else "received", dtype, *map(str, extents)])
    space = stage.workspace(name, (stage.programs(), *extents), dtype)
    program, begins = stage.program_number(), [0] * len(extents)
    part = tir.region(space, [program, *begins], [1, *extents], "w" if to_peer else "r")
    # Plain loads and stores: they are in order with NVSHMEM's, bulk copies are not.
    staging = tir.tile_call("copy", *((lowered, part) if to_peer else (part, lowered)), disable_tma=True)
    held = StridedTile.of(space, [0, *begins], [1, *extents])
    return replace(held, offset=_number(program) * math.prod(extents)), [staging]


def _moves(
    here: StridedTile,
    there: StridedTile,
    to_peer: bool,
    pe: Any,
    update: SignalUpdate | None,
    put: str = "tilescale::put",
) -> list[ir.Stmt]:
    """Calls that move the tile by planes, in loops over its other axes."""
    *outer, rows, columns = _joined(list(zip(here.axes, there.axes, strict=True)))
    loops = [ir.Var(f"plane{i}", "int32") for i in range(len(outer))]
    for var, (mine, theirs) in zip(loops, outer, strict=True):
        here, there = here.at(mine, var), there.at(theirs, var)
    places = [tile.place(*axes) for tile, axes in zip((here, there), zip(rows, columns, strict=True), strict=True)]
    arguments = [*(places if to_peer else reversed(places)), _int64(rows[0].extent), _int64(columns[0].extent), pe]
    if update is not None and not outer:
        signal = (*arguments, *update.flag, update.value, *update.report)
        return [tir.evaluate(tir.extern(f"tilescale::put_signal<{update.kind}>", *signal))]
    move = tir.evaluate(tir.extern(put if to_peer else "tilescale::get", *arguments))
    for var, (mine, _) in reversed(list(zip(loops, outer, strict=True))):
        move = ir.For(var, ir.IntImm("int32", 0), ir.IntImm("int32", mine.extent), ir.ForKind.SERIAL, move)
    if update is None:
        return [move]
    signal = tir.extern(f"tilescale::put_flag<{update.kind}>", *update.flag, update.value, pe, *update.report)
    return [move, tir.evaluate(signal)]


def _joined(axes: list[tuple[TileAxis, TileAxis]]) -> list[tuple[TileAxis, TileAxis]]:
    """Two axes or more, the last one dense on both sides; consecutive axes without a gap are merged."""
    while len(axes) > 1 and all(_follow(*pair) for pair in zip(*axes[-2:], strict=True)):
        here, there = (_join(*pair) for pair in zip(*axes[-2:], strict=True))
        axes = [*axes[:-2], (here, there)]
    if not axes or any(ir.constant(axis.stride) != 1 for axis in axes[-1]):
        axes = [*axes, (ONE, ONE)]
    return axes if len(axes) > 1 else [(ONE, ONE), *axes]


def _follow(outer: TileAxis, inner: TileAxis) -> bool:
    step = ir.constant(inner.stride)
    return inner.whole and step is not None and ir.constant(outer.stride) == step * inner.extent


def _join(outer: TileAxis, inner: TileAxis) -> TileAxis:
    return TileAxis(outer.begin * inner.extent, outer.extent * inner.extent, outer.size * inner.extent, inner.stride)
