# SPDX-License-Identifier: MIT
"""The ranges of the variables of loops and threads, for TVM's analyses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Range

from tilelang_core.ir import walk


def loop_ranges(body: tirx.Stmt) -> dict[tirx.Var, Range]:
    """The range of each loop variable and thread index of a statement."""
    found: dict[tirx.Var, Range] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For):
            found[node.loop_var] = Range.from_min_extent(node.min, node.extent)
        elif isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
            found[node.node.var] = Range.from_min_extent(0, node.value)

    walk(body, visit)
    return found


def analyzer_of(ranges: Mapping[tirx.Var, Range]) -> Analyzer:
    """An analyzer that knows these ranges."""
    analyzer = Analyzer()
    for var, extent in ranges.items():
        analyzer.bind(var, extent)
    return analyzer
