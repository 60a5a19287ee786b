# SPDX-License-Identifier: MIT
"""Loops whose body changes their extent, with the extent that they have at their beginning.

TileLang 0.1.15 writes the extent of a loop into the condition of a `for`, which C evaluates before each iteration. An
extent that loads memory, or a variable, that the body stores to would change while the loop runs. A name keeps it.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tilelang_core.accesses import accesses_in
from tilelang_core.ir import contains
from tilelang_core.rewrite import at, relooped, rewritten


def with_constant_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such loops one that evaluates each of their extents once."""

    def leave(node: Any) -> Any:
        if not isinstance(node, tirx.For) or not _changes_its_extent(node):
            return None
        kept = tirx.Var("extent", node.extent.dtype)
        return tirx.SeqStmt([at(tirx.Bind(kept, node.extent), node), relooped(node, extent=kept)])

    return rewritten(func, leave)


def _changes_its_extent(loop: tirx.For) -> bool:
    written = {access.buffer.data for access in accesses_in(loop.body) if access.writes}
    return contains(loop.extent, lambda node: isinstance(node, tirx.BufferLoad) and node.buffer.data in written)
