# SPDX-License-Identifier: MIT
"""Shared memory of tiles that live within an iteration of a loop.

Before: stock TileLang allocates all tiles at the begin of a kernel, and takes a tile that a loop uses as live in all of
its iterations. After: what only the body of a loop marked by `ITERATIONS` uses is allocated there. So tiles of the body
that never live at the same time get the same memory.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import stmt_functor

from tilelang_core.ir import instances
from tilelang_core.rewrite import relooped, rewrite, sequence

ITERATIONS = "tilescale.iterations"
"""Annotation of a loop whose iterations leave each other only those tiles that are also used outside the loop."""


def with_tiles_in_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such a loop, one that allocates the loop's tiles in its body."""
    loops = [loop for loop in instances(func.body, tirx.For) if ITERATIONS in loop.annotations]
    if not loops:
        return func
    tiles = [tile for tile in instances(func.body, tirx.AllocBuffer) if tile.buffer.scope() == "shared.dyn"]
    names = [(_named(loop.body), _named(func.body, loop)) for loop in loops]
    own = [[tile for tile in tiles if tile.buffer.data in inside - outside] for inside, outside in names]

    def enter(node: Any) -> Any:
        if any(node.same_as(tile) for moved in own for tile in moved):
            return tirx.Evaluate(0)
        for loop, moved in zip(loops, own, strict=True):
            if node.same_as(loop):
                body = sequence([*moved, loop.body])
                return relooped(loop, body=body, annotations={})
        return None

    return func.with_body(rewrite(func.body, enter=enter))


def _named(stmt: tirx.Stmt, but: tirx.Stmt | None = None) -> set[tirx.Var]:
    """Variables and data of buffers that a statement names, but for a statement inside it."""
    found: set[tirx.Var] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            found.add(node.buffer.data)
        elif isinstance(node, tirx.Var):
            found.add(node)
        return not node.same_as(but)

    stmt_functor.pre_order_visit(stmt, visit)
    return found
