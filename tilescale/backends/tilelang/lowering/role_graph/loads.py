# SPDX-License-Identifier: MIT
"""The copies that a producer can make ahead of their use, from memory of this device or of a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilelang_core import ir, tiles
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.copies.peer_memory import ahead
from tilescale.backends.tilelang.lowering.markers import BARRIER
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.statements import is_load, is_pull
from tilescale.backends.tilelang.ptx import BOX_DIMENSIONS, BOX_EXTENT, BULK_BYTES
from tilescale.program.operations import Copy


@dataclass(frozen=True)
class ProducerLoad:
    """A copy into a tile in shared memory that can run ahead.

    Attributes:
        call: the operation; of a peer's memory as one that runs ahead.
        is_far: whether it is from a peer.
    """

    call: ir.Call
    is_far: bool

    @classmethod
    def of(cls, stmt: ir.Stmt, phase: Phase) -> ProducerLoad | None:
        """A statement's load; None if it is not such a copy."""
        if is_pull(stmt):
            call = ahead(phase, stmt.value)
            return cls(call, True) if call is not None else None
        return cls(stmt.value, False) if is_load(stmt) else None

    @property
    def source(self) -> ir.Call:
        return Copy.of(self.call).source if self.is_far else tiles.TileCopy.of(self.call).source

    @property
    def target(self) -> ir.Call:
        """The tile, as a region."""
        return Copy.of(self.call).target if self.is_far else tiles.TileCopy.of(self.call).target

    @property
    def tile(self) -> ir.Buffer:
        """The loaded tile in shared memory."""
        return ir.region_parts(self.target)[0]

    def under(self, names: Mapping[ir.Var, ir.PrimExpr]) -> ProducerLoad:
        """The same load, its names replaced by expressions."""
        return replace(self, call=ir.substitute(self.call, dict(names)))

    def made(self, source: ir.Call, target: ir.Call, barrier: ir.BufferLoad) -> ir.Stmt:
        """The load of other regions, whose bytes a barrier counts."""
        if not self.is_far:
            return tir.tile_call("tma_copy", source, target, barrier=barrier, is_tma_copy=1)
        return tir.evaluate(Copy.of(self.call).between(source, target, **{BARRIER: barrier}))

    def is_bulk(self, phase: Phase) -> bool:
        """Whether it fills all of its tile, and one bulk copy can make it."""
        source, _, box = ir.region_parts(self.source)
        tile, begins, extents = ir.region_parts(self.target)
        shape = ir.constants(tile.shape)
        if shape is None:
            return False
        whole = all(ir.constant(b) == 0 for b in begins) and [ir.constant(n) for n in extents] == shape
        alike = [n for n in map(ir.constant, box) if n != 1] == [n for n in shape if n != 1]
        between = source.scope() == "global" and tile.scope() == "shared.dyn" and str(source.dtype) == str(tile.dtype)
        return whole and alike and between and is_box(source, shape, phase)


def is_box(source: ir.Buffer, box: list[int], phase: Phase) -> bool:
    """Whether a bulk copy takes a box of a tensor: of few dimensions, with rows of multiples of 16 bytes."""
    size = ir.bits(str(source.dtype)) // 8
    is_too_large = len(source.shape) > BOX_DIMENSIONS or max(box[:-1], default=0) > BOX_EXTENT
    if not size or is_too_large or box[-1] * size % BULK_BYTES:
        return False
    stride = size
    for extent in source.shape[:0:-1]:
        stride *= ir.constant(phase.sized(extent)) or 1
        if stride % BULK_BYTES:
            return False
    return True
