# SPDX-License-Identifier: MIT
"""Which copies a loader can make in bulk."""

from __future__ import annotations

from tilelang_core import ir, tiles, tl
from tilescale.backends.cuda.lowering.phase import Phase

BULK, LONGEST, RANKS = 16, 256, 5
"""Bulk copies (CUDA driver API, cuTensorMapEncodeTiled): bytes that make up strides, rows of a box, dimensions."""


def is_bulk_load(stmt: ir.Stmt, phase: Phase) -> bool:
    """Whether a statement is a bulk copy from memory into all of a tile in shared memory."""
    if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.COPY:
        return False
    copy = tiles.TileCopy.of(stmt.value)
    if not tiles.is_region(copy.source):
        return False
    source, _, box = ir.region_parts(copy.source)
    tile, begins, extents = ir.region_parts(copy.target)
    shape = ir.constants(tile.shape)
    if shape is None:
        return False
    whole = all(ir.constant(b) == 0 for b in begins) and [ir.constant(n) for n in extents] == shape
    alike = [n for n in map(ir.constant, box) if n != 1] == [n for n in shape if n != 1]
    between = source.scope() == "global" and tile.scope() == "shared.dyn" and str(source.dtype) == str(tile.dtype)
    return whole and alike and between and _is_box(source, shape, phase)


def _is_box(source: ir.Buffer, box: list[int], phase: Phase) -> bool:
    size = ir.bits(str(source.dtype)) // 8
    if not size or len(source.shape) > RANKS or box[-1] * size % BULK or max(box[:-1], default=LONGEST) > LONGEST:
        return False
    stride = size
    for extent in source.shape[:0:-1]:
        stride *= ir.constant(phase.sized(extent)) or 1
        if stride % BULK:
            return False
    return True
