# SPDX-License-Identifier: MIT
"""Copies as loops over their elements, for boxes that no tile operation takes."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tilelang_core.ir import constant, region_parts
from tilelang_core.rewrite import loop_variables, parallel

__all__ = ["nest"]


def nest(source: tirx.Call, target: tirx.Call) -> tirx.Stmt:
    """A copy as parallel loops, which skip elements beyond its extents or either tile."""
    sides = [region_parts(region) for region in (source, target)]
    axes = [[axis for axis, n in enumerate(extents) if constant(n) != 1] for _, _, extents in sides]
    extents = [_known(sides[0], a, sides[1], b) for a, b in zip(*axes, strict=True)]
    loops = loop_variables(extents)
    indices: list[list[Any]] = []
    guards: list[tirx.PrimExpr] = []
    for (buffer, begins, counts), used in zip(sides, axes, strict=True):
        at = dict(zip(used, loops, strict=True))
        indices.append([begin + at[axis] if axis in at else begin for axis, begin in enumerate(begins)])
        for axis, loop in at.items():
            if constant(counts[axis]) is None:
                guards += [tirx.LT(loop, counts[axis]), tirx.LT(indices[-1][axis], buffer.shape[axis])]
    (read, _, _), (written, _, _) = sides
    value: Any = tirx.BufferLoad(read, indices[0])
    value = value if read.dtype == written.dtype else tirx.Cast(str(written.dtype), value)
    body: tirx.Stmt = tirx.BufferStore(written, value, indices[1])
    for guard in reversed(guards):
        body = tirx.IfThenElse(guard, body, None)
    return parallel(loops, extents, body)


def _known(source: Any, a: int, target: Any, b: int) -> tirx.PrimExpr:
    """The extent of a loop: that of the copy if it is a number, else the smaller side's."""
    counts = [constant(side[2][axis]) for side, axis in ((source, a), (target, b))]
    rooms = [constant(side[0].shape[axis]) for side, axis in ((source, a), (target, b))]
    known = [n for n in counts if n is not None] or [n for n in rooms if n is not None]
    return tirx.IntImm("int32", min(known)) if known else source[2][a]
