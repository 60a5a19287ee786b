# SPDX-License-Identifier: MIT
"""Copies between tiles of different extents, in a form in which stock TileLang does the same by all instructions.

TileLang 0.1.15 leaves the extents of `T.copy(A[:, :8], B[:, :16])` as they are where as many differ from 1. Threads
copy the extents of the side in the nearer memory, from or to the begin of the other one; bulk copies, which are
preferred where possible, fail. Here the other side gets these extents beforehand.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tilelang_core import tl
from tilelang_core.ir import constant, contains, op_name, proves, region_parts
from tilelang_core.rewrite import recall, resized, rewrite

COPIES = (tl.COPY, tl.ASYNC_COPY, tl.TMA_COPY)

_NEARNESS = {"local.fragment": 2, "local": 2, "shared": 1, "shared.dyn": 1, "shared.tmem": 1}
"""Distance of memory from the threads, in the order of CopyNode::MakeIterVars (src/op/copy.cc); others are farther."""


def executed(copy: tirx.Call) -> tirx.Call | None:
    """The copy with the executed extents on both sides; None where TileLang refuses it.

    It refuses sides of which another number of extents differ from 1, and a nearer side smaller than the source.
    """
    if "gather4_rows" in (copy.annotations or {}):
        return copy  # it has no region for its four rows
    regions = copy.args[:2]
    sides = [region_parts(region) for region in regions]
    extents = [list(side[2]) for side in sides]
    axes = [[axis for axis, n in enumerate(side) if constant(n) != 1] for side in extents]
    if len(axes[0]) != len(axes[1]):
        return None
    source, target = (_NEARNESS.get(buffer.scope(), 0) for buffer, _, _ in sides)
    lead = 0 if source >= target else 1
    changed = False
    for axis, other in zip(axes[lead], axes[1 - lead], strict=True):
        wanted, given = extents[lead][axis], extents[1 - lead][other]
        if proves(wanted == given, {}):
            continue
        if lead == 1 and proves(wanted < given, {}):
            return None
        extents[1 - lead][other], changed = wanted, True
    if not changed:
        return copy
    alike = [resized(region, given) for region, given in zip(regions, extents, strict=True)]
    return recall(copy, [*alike, *copy.args[2:]])


def with_like_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such copies one that does the same without them."""

    def alike(node: Any) -> tirx.Call | None:
        made = executed(node) if op_name(node) in COPIES else None
        return None if made is node else made

    if not contains(func.body, lambda node: alike(node) is not None):
        return func
    return func.with_body(rewrite(func.body, leave=alike))
