# SPDX-License-Identifier: MIT
"""Dividends without negated terms: stock TileLang simplifies divisions of negated terms to other values.

TVM's simplifiers, as TileLang 0.1.15 has them, get these wrong:

- `-(i // m) % n` and `-(i % m) // n`, and each sum that becomes one: of `(8 - i // m) % n` where n divides 8, or of a
  parallel loop's variable, which becomes a quotient of the thread's index. The canonical form takes the factor -1 out
  of the division, which is right for truncated division alone. A swizzled layout divides the indices of a tile.
- `(base - i) % n` and `(base - i) // n` as an index with one loop or thread variable in it: IterMapSimplify, in
  FlattenBuffer, divides the base by -1 and drops what that leaves. `(rank - iteration) % ranks`, a rotation of the
  ranks, is such a number.

So a negated term becomes a complement: `-i` is `(i ^ 63) - 63` where `i` is at most 63, and `(i ^ -1) + 1` otherwise.
The simplifiers know nothing of exclusive or.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tvm import tirx
from tvm.arith import Analyzer
from tvm.ir import Op

from tilelang_core import ir
from tilelang_core.ir import constant, contains, is_division, is_negation
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import at, rewrite, rewritten, truncated_quotient, with_indices

_MANY = 1 << 20
"""Larger bounds are not used: arithmetic on them may overflow."""


def with_complements(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it divides negated terms one that divides complements."""
    known = _Variables(func)

    def in_index(node: Any) -> Any:
        return known.divided(node, ()) if is_division(node) else None

    def kept(index: tirx.PrimExpr) -> tirx.PrimExpr:
        return rewrite(tirx.Evaluate(index), leave=in_index).value if contains(index, is_division) else index

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            return with_indices(node, [kept(index) for index in node.indices])
        if isinstance(node, tirx.Bind) and node.var.dtype in ("int32", "int64"):  # it may be divided somewhere
            return at(tirx.Bind(node.var, _added(node.value, known.analyzer, known.uniform)), like=node)
        if not is_division(node):
            return None
        made = known.divided(node, known.uniform)
        is_trip_count = not made.same_as(node) and any(map(node.same_as, known.trip_counts))
        return truncated_quotient(node.a, node.b) if is_trip_count else made

    return rewritten(func, leave)


def with_complements_in_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same for indices that a layout divides, once the layouts are inferred."""
    analyzer, layouts = analyzer_of(loop_ranges(func.body)), ir.layout_map(func)
    divided = {tile for tile, layout in layouts.items() if any(contains(index, is_division) for index in layout.index)}

    def leave(node: Any) -> Any:
        if not isinstance(node, tirx.BufferLoad | tirx.BufferStore) or node.buffer not in divided:
            return None
        return with_indices(node, [_added(index, analyzer) for index in node.indices])

    return rewritten(func, leave)


class _Variables:
    """Known facts about a function's variables.

    Attributes:
        analyzer: knows their ranges.
        uniform: neither quotients of the thread's index nor vectors, as variables of parallel loops become.
        of_quotients: names of numbers that divide negated terms: TileLang puts the numbers in their places.
        trip_counts: quotients in extents of loops. TileLang derives wrong numbers of threads from complements there.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        ranges = loop_ranges(func.body)
        self.analyzer, self.uniform = analyzer_of(ranges), {*func.params, *ranges}
        self.of_quotients, self.trip_counts = set[tirx.Var](), list[tirx.FloorDiv]()
        for stmt in ir.statements(func.body):
            if isinstance(stmt, tirx.Bind) and contains(stmt.value, self._is_negated_quotient):
                self.of_quotients.add(stmt.var)
            elif isinstance(stmt, tirx.For):
                self.trip_counts += ir.instances(stmt.extent, tirx.FloorDiv)
                if stmt.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
                    self.uniform.remove(stmt.loop_var)

    def _is_negated_quotient(self, node: Any) -> bool:
        if isinstance(node, tirx.Var):
            return node in self.of_quotients
        return is_division(node) and contains(node.a, is_negation)

    def divided(self, division: Any, kept: Collection[tirx.Var]) -> Any:
        """A division by a constant with complements in the dividend, but of multiples of variables that are `kept`."""
        if constant(division.b) is None:
            return division
        names = ir.variables(division.a) & self.of_quotients
        opaque = {name: tirx.bitwise_and(name, tirx.const(-1, name.dtype)) for name in names}
        dividend = _added(ir.substitute(division.a, opaque) if opaque else division.a, self.analyzer, kept)
        return division if dividend.same_as(division.a) else type(division)(dividend, division.b)


def _added(value: tirx.PrimExpr, analyzer: Analyzer, kept: Collection[tirx.Var] = ()) -> tirx.PrimExpr:
    """The same number, with complements of negated terms but constants and multiples of variables that are `kept`."""

    def added(value: tirx.PrimExpr, times: int) -> tirx.PrimExpr:
        if isinstance(value, tirx.Add | tirx.Sub):
            return added(value.a, times) + added(value.b, times if isinstance(value, tirx.Add) else -times)
        if isinstance(value, tirx.Mul):
            for factor, other in (value.a, value.b), (value.b, value.a):
                if (number := constant(factor)) is not None:
                    return added(other, times * number)
        if isinstance(value, tirx.Min | tirx.Max) and times > 0:
            return type(value)(added(value.a, 1), added(value.b, 1)) * times
        is_kept = times > 0 or constant(value) is not None or value in kept
        return value * times if is_kept else _complement(value * -times, analyzer)

    if not contains(value, is_negation):
        return value
    made = added(value, 1)
    return made if contains(made, _is_complement) else value


def _complement(value: tirx.PrimExpr, analyzer: Analyzer) -> tirx.PrimExpr:
    bound = analyzer.const_int_bound(value)
    if bound.min_value < 0 or bound.max_value >= _MANY:
        return tirx.bitwise_xor(value, tirx.const(-1, value.dtype)) + 1
    ones = tirx.const((1 << bound.max_value.bit_length()) - 1, value.dtype)
    return tirx.bitwise_and(tirx.bitwise_xor(value, ones), ones) - ones


def _is_complement(node: Any) -> bool:
    return isinstance(node, tirx.Call) and node.op.same_as(Op.get("tirx.bitwise_xor"))
