# SPDX-License-Identifier: MIT
"""Collectives of whole tensors as grids: each block exchanges one tile with the blocks of its number on all devices.

Before: a collective of whole tensors, by all devices. After: a grid over the tiles of a device's part. A block loads
its tile, of every part where the source has all; the same collective of tiles follows; the block stores the result.
Both add in the order of ranks. Declines collectives with options of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.arrival_reduce import copy, whole
from tilescale.program import ops
from tilescale.program.model import GridPhase, Launch, location
from tilescale.program.operations import Collective

LEAST, MOST = 256, 2048
"""Elements of a tile, within these limits where extents have such divisors."""

WHOLE = {
    "allreduce": (False, False),
    "reduce_scatter": (True, False),
    "all_gather": (False, True),
    "all_to_all": (True, True),
}
"""Whether the source, and the target, have the parts of all units."""


def tiles_of(made: Collective, stmt: ir.Stmt, launch: Launch, blocks: int) -> tuple[GridPhase, Launch]:
    """The grid that does what a collective of whole tensors does. Raises Declined: it stays a collective of the device.
    `blocks`: of a device, at once."""
    where = location(stmt)
    plain = all(x is None for x in (made.impl, made.norm, made.combine, made.flags, made.wire))
    if made.name not in WHOLE or not plain:
        raise Declined(f"T.{made.name} of whole tensors has no form of tiles", where)
    units = ir.constant(dict(launch.extents)[made.level])
    extents = ir.constants(ir.region_parts(made.source)[2])
    if extents is None or units is None:
        raise Declined("the extents of its tensor are known at launch only", where)
    sides = [
        _Side(region, made.dim or 0, units if is_whole else 1)
        for region, is_whole in zip((made.source, made.target), WHOLE[made.name], strict=True)
    ]
    part = sides[0].part
    shape = _tile(part, blocks)
    counts = [n // size for n, size in zip(part, shape, strict=True)]
    axes = [axis for axis in reversed(range(len(counts))) if counts[axis] > 1] or [0]
    programs = {axis: ir.Var(f"tile{axis}", "int32") for axis in axes}
    places = [programs.get(axis, 0) * size for axis, size in enumerate(shape)]
    source = sides[0].buffer(shape)
    target = source if sides[0].parts == sides[1].parts == 1 else sides[1].buffer(shape)
    tiles = [source] if target is source else [source, target]
    regions = [whole(source, "rw")] if target is source else [whole(source, "r"), whole(target, "w")]
    level = ir.StringImm(made.level)
    exchange = ir.AttrStmt(level, ops.SCALE, level, tir.evaluate(tir.recall(made.call, regions)))
    loads = [copy(far, near) for far, near in sides[0].pieces(source, places, shape, "rw")]
    stores = [copy(near, far) for far, near in sides[1].pieces(target, places, shape, "wr")]
    phase = GridPhase(tir.sequence([tir.at(s, stmt) for s in (*loads, exchange, *stores)]))
    grid = tuple(ir.IntImm("int32", counts[axis]) for axis in axes)
    return phase, replace(launch, grid=grid, programs=tuple(programs.values()), buffers=tuple(tiles), where=where)


@dataclass(frozen=True)
class _Side:
    """The source or the target of a collective.

    Attributes:
        axis: the dimension along which parts follow one another.
        parts: how many it has.
    """

    region: ir.Call
    axis: int
    parts: int

    @property
    def part(self) -> list[int]:
        """Extents of a part."""
        extents = [ir.integer(n) for n in ir.region_parts(self.region)[2]]
        extents[self.axis] //= self.parts
        return extents

    def buffer(self, shape: Sequence[int]) -> ir.Buffer:
        """A tile of each part, one after the other."""
        buffer = ir.region_parts(self.region)[0]
        extents = [n * self.parts if axis == self.axis else n for axis, n in enumerate(shape)]
        name = f"{buffer.name.removesuffix('_view')}_tile"
        return tir.local_buffer(name, [ir.IntImm("int32", n) for n in extents], str(buffer.dtype), "shared.dyn")

    def pieces(
        self, tile: ir.Buffer, places: Sequence[Any], shape: Sequence[int], access: str
    ) -> list[tuple[ir.Call, ir.Call]]:
        """The tile of each part in the tensor, and where it is in the buffer; `access` to the one and the other."""
        buffer, begins, _ = ir.region_parts(self.region)
        extents = [ir.IntImm("int32", n) for n in shape]
        found = []
        for number in range(self.parts):
            step = [number if axis == self.axis else 0 for axis in range(len(shape))]
            far = [b + p + s * n for b, p, s, n in zip(begins, places, step, self.part, strict=True)]
            near = [ir.IntImm("int32", s * n) for s, n in zip(step, shape, strict=True)]
            pair = tir.region(buffer, far, extents, access[0]), tir.region(tile, near, extents, access[1])
            found.append(pair)
        return found


def _tile(extents: list[int], blocks: int) -> list[int]:
    """The smallest tile with which each block has the fewest: a part of a row, or some whole rows."""
    shapes = [
        [*[1] * axis, n, *extents[axis + 1 :]]
        for axis, extent in enumerate(extents)
        for n in range(1, min(extent, MOST) + 1)
        if extent % n == 0
    ]
    small = [shape for shape in shapes if math.prod(shape) <= MOST]
    fits = [shape for shape in small if math.prod(shape) >= LEAST] or [max(small, key=math.prod)]
    whole = math.prod(extents)
    return min(fits, key=lambda shape: (math.ceil(whole / math.prod(shape) / blocks), math.prod(shape)))
