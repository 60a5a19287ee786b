# SPDX-License-Identifier: MIT
"""With which statement of a function something goes wrong, found by trying functions that end before it.

Why: errors of TVM's passes lack the location. Before: a function that cannot be lowered. After: its first statement
such that the function up to there cannot be lowered either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tilelang_core import ir
from tilelang_core import rewrite as tir


def first_failing(func: tirx.PrimFunc, fails: Callable[[tirx.PrimFunc], bool]) -> ir.Stmt | None:
    """The first statement with which a function fails; None if no end of it is to blame."""
    stmts: list[ir.Stmt] = []
    _each(func.body, stmts.append)
    low, high = 0, len(stmts)
    if fails(_up_to(func, 0)) or not fails(_up_to(func, high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(_up_to(func, middle)) else (middle, high)
    return stmts[high - 1]


def _up_to(func: tirx.PrimFunc, count: int) -> tirx.PrimFunc:
    """The function with its first `count` statements; the statements around them are kept."""
    seen = 0

    def drop(stmt: ir.Stmt) -> ir.Stmt | None:
        nonlocal seen
        seen += 1
        return None if seen <= count else tir.sequence([])

    return func.with_body(_each(func.body, drop))


def _each(body: ir.Stmt, visit: Callable[[ir.Stmt], ir.Stmt | None]) -> ir.Stmt:
    """The body, each statement that does something replaced by what `visit` makes of it."""

    def enter(node: Any) -> ir.Stmt | None:
        is_parallel = isinstance(node, ir.For) and node.kind == ir.ForKind.PARALLEL
        if not is_parallel and not isinstance(node, ir.Evaluate | ir.BufferStore):
            return None
        return visit(node) or node

    return tir.rewrite(body, enter=enter)
