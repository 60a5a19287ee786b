# SPDX-License-Identifier: MIT
"""Collectives of whole tensors as grids: each block exchanges one tile with the blocks of its number on all devices.

Before: an all-reduce of a whole tensor. After: a grid over the tensor's tiles; a block loads its tile, reduces it with
those of its peers, and stores the sum. Both add in the order of ranks. Declines other collectives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.arrival_reduce import copy, whole
from tilescale.program import ops
from tilescale.program.model import GridPhase, Launch, location
from tilescale.program.operations import Collective

LEAST, MOST = 256, 2048
"""Elements of a tile: as many as give each block a tile, within these limits."""


def tiles_of(made: Collective, stmt: ir.Stmt, launch: Launch, blocks: int) -> tuple[GridPhase, Launch]:
    """The grid that does what a collective of whole tensors does.

    Args:
        blocks: of a device, at once.

    Raises:
        Declined: it stays a collective of the device.
    """
    where = location(stmt)
    if made.name != "allreduce" or made.op is None or made.norm is not None:
        raise Declined(f"T.{made.name} of whole tensors has no form of tiles", where)
    if made.impl is not None:
        raise Declined(f"impl={made.impl!r} was asked for", where)
    extents = ir.constants(ir.region_parts(made.source)[2])
    if extents is None:
        raise Declined("the extents of its tensor are known at launch only", where)
    shape = _tile(extents, min(max(math.prod(extents) // blocks, LEAST), MOST))
    counts = [n // size for n, size in zip(extents, shape, strict=True)]
    axes = [axis for axis in reversed(range(len(counts))) if counts[axis] > 1] or [0]
    programs = {axis: ir.Var(f"tile{axis}", "int32") for axis in axes}
    places = [programs.get(axis, 0) * size for axis, size in enumerate(shape)]
    name, dtype = ir.region_parts(made.source)[0].name, made.dtype
    tile = tir.local_buffer(f"{name}_tile", [ir.IntImm("int32", n) for n in shape], dtype, "shared.dyn")
    body = [
        copy(_part(made.source, places, shape, "r"), whole(tile, "w")),
        _reduced(made, tile),
        copy(whole(tile, "r"), _part(made.target, places, shape, "w")),
    ]
    phase = GridPhase(tir.sequence([tir.at(s, stmt) for s in body]))
    grid = tuple(ir.IntImm("int32", counts[axis]) for axis in axes)
    return phase, replace(launch, grid=grid, programs=tuple(programs.values()), buffers=(tile,), where=where)


def _tile(extents: list[int], most: int) -> list[int]:
    """Extents of a tile of at most that many elements: of a row, or of some whole rows."""
    shape = [1] * len(extents)
    for axis in reversed(range(len(extents))):
        shape[axis] = max(n for n in range(1, min(extents[axis], most) + 1) if extents[axis] % n == 0)
        most //= shape[axis]
        if shape[axis] < extents[axis]:
            break
    return shape


def _part(region: ir.Call, places: list[Any], shape: list[int], access: str) -> ir.Call:
    """A tile of a region of a tensor."""
    buffer, begins, _ = ir.region_parts(region)
    begins = [begin + place for begin, place in zip(begins, places, strict=True)]
    return tir.region(buffer, begins, [ir.IntImm("int32", n) for n in shape], access)


def _reduced(made: Collective, tile: ir.Buffer) -> ir.Stmt:
    """The tile, summed over the devices."""
    call = tir.recall(made.call, [whole(tile, "rw")])
    level = ir.StringImm(made.level)
    return ir.AttrStmt(level, ops.SCALE, level, tir.evaluate(call))
