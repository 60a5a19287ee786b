# SPDX-License-Identifier: MIT
"""Loops of at most one iteration, in a form that stock TileLang does not turn into loops of exactly one.

TileLang 0.1.15's Simplify takes for granted that a loop is entered when it simplifies its extent: a quotient that is 0
or 1 becomes 1. `T.ceildiv(tiles - block, blocks)`, the trip count of a block, is such an extent where there are fewer
tiles than blocks: blocks with trip count 0 would execute an iteration. Written as `-1 - (-a - 1) // b` it keeps its
value.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tilelang_core.ir import constant, substitute, variables, walk
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import at, relooped, rewritten

_ARITHMETIC = (
    tirx.Var, tirx.IntImm, tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max,
)  # fmt: skip


def with_kept_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such loops one that computes the same and keeps doing so."""
    analyzer, names = analyzer_of(loop_ranges(func.body)), _names(func.body)
    short_extents: set[tirx.Var] = set()  # names of such extents
    same: dict[tirx.Var, tirx.Var] = {}  # names of names

    def is_short(extent: tirx.PrimExpr) -> bool:
        value = _spelled_out(extent, names)
        if not isinstance(value, tirx.FloorDiv) or (constant(value.b) or 0) < 1:
            return False
        bound = analyzer.const_int_bound(value)
        return bound.min_value < 1 and bound.max_value <= 1

    def named(node: Any) -> None:
        if isinstance(node, tirx.Bind) and isinstance(node.value, tirx.Var):
            same[node.var] = same.get(node.value, node.value)
        elif isinstance(node, tirx.For) and isinstance(node.extent, tirx.Var) and is_short(node.extent):
            short_extents.add(same.get(node.extent, node.extent))

    def kept(value: tirx.FloorDiv) -> tirx.PrimExpr:
        return -1 - tirx.floordiv(-1 * value.a - 1, value.b)

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.Bind) and node.var in short_extents and isinstance(node.value, tirx.FloorDiv):
            return at(tirx.Bind(node.var, kept(node.value)), like=node)
        if isinstance(node, tirx.For) and isinstance(node.extent, tirx.FloorDiv) and is_short(node.extent):
            return relooped(node, extent=kept(node.extent))
        return None

    walk(func.body, named)
    return rewritten(func, leave)


def _names(body: tirx.Stmt) -> dict[tirx.Var, tirx.PrimExpr]:
    """Names of numbers, with their values, which TileLang puts in their places."""
    names: dict[tirx.Var, tirx.PrimExpr] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Bind) and isinstance(node.value, _ARITHMETIC):
            names[node.var] = _spelled_out(node.value, names)

    walk(body, visit)
    return names


def _spelled_out(value: tirx.PrimExpr, names: dict[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
    return substitute(value, names) if variables(value) & names.keys() else value
