# SPDX-License-Identifier: MIT
"""Loops of at most one step, in a form of which stock TileLang does not make loops of one.

TileLang 0.1.15's Simplify takes for granted that a loop is entered when it simplifies its extent: a quotient that is 0
or 1 becomes 1. `T.ceildiv(tiles - block, blocks)`, the turns of a block, is such an extent where there are fewer tiles
than blocks: those that should do nothing would do something. Written as `-1 - (-a - 1) // b` it keeps its value.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range

from tilelang_core.ir import constant, substitute, variables, walk
from tilelang_core.rewrite import at, rewrite

__all__ = ["with_kept_extents"]


def with_kept_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such loops one that computes the same and keeps doing so."""
    analyzer, names = _bounds(func.body)
    changed = False

    def leave(node: Any) -> Any:
        nonlocal changed
        if not isinstance(node, tirx.For):
            return None
        extent = substitute(node.extent, names) if variables(node.extent) & names.keys() else node.extent
        if not isinstance(extent, tirx.FloorDiv) or (constant(extent.b) or 0) < 1:
            return None
        bound = analyzer.const_int_bound(extent)
        if bound.min_value >= 1 or bound.max_value > 1:
            return None
        changed = True
        kept = -1 - tirx.floordiv(-1 * extent.a - 1, extent.b)
        made = tirx.For(
            node.loop_var, node.min, kept, node.kind, node.body, node.thread_binding, node.annotations, node.step
        )
        return at(made, like=node)

    body = rewrite(func.body, leave=leave)
    return func.with_body(body) if changed else func


def _bounds(body: tirx.Stmt) -> tuple[Analyzer, dict[tirx.Var, tirx.PrimExpr]]:
    """What is known of variables of loops and threads, and names of numbers, with their values."""
    analyzer, names = Analyzer(), dict[tirx.Var, tirx.PrimExpr]()

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and constant(node.extent) is not None:
            analyzer.bind(node.loop_var, Range.from_min_extent(node.min, node.extent))
        elif isinstance(node, tirx.AttrStmt) and isinstance(node.node, tirx.IterVar) and constant(node.value):
            analyzer.bind(node.node.var, Range.from_min_extent(0, node.value))
        elif isinstance(node, tirx.Bind) and isinstance(node.value, tirx.PrimExpr):
            names[node.var] = substitute(node.value, names) if variables(node.value) & names.keys() else node.value

    walk(body, visit)
    return analyzer, names
