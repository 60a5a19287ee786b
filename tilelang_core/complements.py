# SPDX-License-Identifier: MIT
"""Numbers from which something is taken away, in a form that stock TileLang does not simplify to another value.

TVM's simplifiers, as TileLang 0.1.15 has them, get divisions of such numbers wrong:

- `-(i // m) % n` and `-(i % m) // n`, and each sum that becomes one: of `(8 - i // m) % n` where n divides 8, or of a
  parallel loop's variable, which becomes a quotient of the thread's index. The canonical form takes the factor -1 out
  of the division, which is right for truncated division alone. A swizzled layout divides the indices of a tile.
- `(base - i) % n` and `(base - i) // n` as an index with one loop or thread variable in it: IterMapSimplify, in
  FlattenBuffer, divides the base by -1 and drops what that leaves. `(rank - turn) % ranks`, the order in which ranks
  go round, is such a number.

So a term is added as its complement: `-i` is `(i ^ 63) - 63` where `i` is at most 63, and `(i ^ -1) + 1` otherwise.
The simplifiers know nothing of exclusive or.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.arith import Analyzer

from tilelang_core import ir
from tilelang_core.ir import constant, contains
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import at, rewrite, rewritten, with_indices

_MANY = 1 << 20
"""Larger bounds are not used: arithmetic on them may overflow."""

_DIVISIONS = tirx.FloorDiv, tirx.FloorMod


def with_complements(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it divides such numbers one that divides sums with complements."""
    ranges = loop_ranges(func.body)
    analyzer, plain = analyzer_of(ranges), {*func.params, *ranges} - _parallel_loops(func.body)

    def wholly(value: tirx.PrimExpr) -> tirx.PrimExpr:
        """An index, or a number that may become a part of one."""
        divided = lambda node: _divided(node, analyzer, set()) if _is_division(node) else None  # noqa: E731
        return rewrite(tirx.Evaluate(value), leave=divided).value

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            return with_indices(node, [wholly(index) for index in node.indices])
        if isinstance(node, tirx.Bind) and node.var.dtype in ("int32", "int64"):
            return at(tirx.Bind(node.var, _rising(wholly(node.value), analyzer, plain)), like=node)
        return _divided(node, analyzer, plain) if _is_division(node) else None

    return rewritten(func, leave)


def with_complements_in_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same for indices that a layout divides, once the layouts are inferred.

    The map of layouts has data variables of its own, with the names of the buffers.
    """
    analyzer = analyzer_of(loop_ranges(func.body))
    blocks = [stmt for stmt in ir.statements(func.body) if isinstance(stmt, tirx.SBlock)]
    layouts = [each for block in blocks for each in block.annotations.get("layout_map", {}).items()]
    names = {data.name for data, layout in layouts if any(contains(index, _is_division) for index in layout.index)}

    def leave(node: Any) -> Any:
        if not isinstance(node, tirx.BufferLoad | tirx.BufferStore) or node.buffer.data.name not in names:
            return None
        return with_indices(node, [_rising(index, analyzer, set()) for index in node.indices])

    return rewritten(func, leave)


def _parallel_loops(body: tirx.Stmt) -> set[tirx.Var]:
    """Variables that become quotients of the thread's index, or vectors."""
    loops = [stmt for stmt in ir.statements(body) if isinstance(stmt, tirx.For)]
    return {loop.loop_var for loop in loops if loop.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)}


def _divided(division: Any, analyzer: Analyzer, plain: set[tirx.Var]) -> Any:
    if constant(division.b) is None:
        return None
    rising = _rising(division.a, analyzer, plain)
    return division if rising.same_as(division.a) else type(division)(rising, division.b)


def _rising(value: tirx.PrimExpr, analyzer: Analyzer, plain: set[tirx.Var]) -> tirx.PrimExpr:
    """A number of the same value from which nothing is taken away but constants and multiples of `plain` variables."""

    def added(value: tirx.PrimExpr, times: int) -> tirx.PrimExpr:
        if isinstance(value, tirx.Add | tirx.Sub):
            return added(value.a, times) + added(value.b, times if isinstance(value, tirx.Add) else -times)
        if isinstance(value, tirx.Mul):
            for factor, other in (value.a, value.b), (value.b, value.a):
                if (number := constant(factor)) is not None:
                    return added(other, times * number)
        if isinstance(value, tirx.Min | tirx.Max) and times > 0:
            return type(value)(added(value.a, 1), added(value.b, 1)) * times
        is_kept = times > 0 or constant(value) is not None or value in plain
        return value * times if is_kept else _complement(value * -times, analyzer)

    return added(value, 1) if contains(value, _takes_away) else value


def _complement(value: tirx.PrimExpr, analyzer: Analyzer) -> tirx.PrimExpr:
    """The negative of a number."""
    bound = analyzer.const_int_bound(value)
    if bound.min_value < 0 or bound.max_value >= _MANY:
        return tirx.bitwise_xor(value, tirx.const(-1, value.dtype)) + 1
    ones = tirx.const((1 << bound.max_value.bit_length()) - 1, value.dtype)
    return tirx.bitwise_and(tirx.bitwise_xor(value, ones), ones) - ones


def _takes_away(node: Any) -> bool:
    if isinstance(node, tirx.Sub):
        return constant(node.b) is None
    return isinstance(node, tirx.Mul) and any((constant(factor) or 0) < 0 for factor in (node.a, node.b))


def _is_division(node: Any) -> bool:
    return isinstance(node, _DIVISIONS)
