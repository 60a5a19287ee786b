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
from tvm.ir import Op

from tilelang_core import ir
from tilelang_core.ir import constant, contains
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import at, rewrite, rewritten, truncated_quotient, with_indices

_MANY = 1 << 20
"""Larger bounds are not used: arithmetic on them may overflow."""

_DIVISIONS = tirx.FloorDiv, tirx.FloorMod


def with_complements(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it divides such numbers one that divides sums with complements."""
    ranges = loop_ranges(func.body)
    analyzer, plain = analyzer_of(ranges), {*func.params, *ranges} - _parallel_loops(func.body)
    names, counts = _names_of_quotients(func.body), _trip_counts(func.body)

    def in_index(node: Any) -> Any:
        return _divided(node, analyzer, set(), names) if _is_division(node) else None

    def kept(index: tirx.PrimExpr) -> tirx.PrimExpr:
        return rewrite(tirx.Evaluate(index), leave=in_index).value if contains(index, _is_division) else index

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            return with_indices(node, [kept(index) for index in node.indices])
        if isinstance(node, tirx.Bind) and node.var.dtype in ("int32", "int64"):  # it may be divided somewhere
            return at(tirx.Bind(node.var, _rising(node.value, analyzer, plain)), like=node)
        if not _is_division(node):
            return None
        made = _divided(node, analyzer, plain, names)
        return made if made.same_as(node) or not any(map(node.same_as, counts)) else truncated_quotient(node.a, node.b)

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


def _names_of_quotients(body: tirx.Stmt) -> set[tirx.Var]:
    """Names of numbers with divisions of numbers that fall: TileLang puts the numbers in their places."""
    names: set[tirx.Var] = set()

    def falls(node: Any) -> bool:
        return node in names if isinstance(node, tirx.Var) else _is_division(node) and contains(node.a, _takes_away)

    for stmt in ir.statements(body):
        if isinstance(stmt, tirx.Bind) and contains(stmt.value, falls):
            names.add(stmt.var)
    return names


def _trip_counts(body: tirx.Stmt) -> list[tirx.FloorDiv]:
    """Quotients in the extents of loops. TileLang derives wrong numbers of threads from complements there."""
    loops = [stmt for stmt in ir.statements(body) if isinstance(stmt, tirx.For)]
    return [quotient for loop in loops for quotient in ir.instances(loop.extent, tirx.FloorDiv)]


def _divided(division: Any, analyzer: Analyzer, plain: set[tirx.Var], names: set[tirx.Var]) -> Any:
    if constant(division.b) is None:
        return division
    opaque = {name: tirx.bitwise_and(name, tirx.const(-1, name.dtype)) for name in ir.variables(division.a) & names}
    rising = _rising(ir.substitute(division.a, opaque) if opaque else division.a, analyzer, plain)
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

    if not contains(value, _takes_away):
        return value
    rising = added(value, 1)
    return rising if contains(rising, _is_complement) else value


def _complement(value: tirx.PrimExpr, analyzer: Analyzer) -> tirx.PrimExpr:
    """The negative of a number."""
    bound = analyzer.const_int_bound(value)
    if bound.min_value < 0 or bound.max_value >= _MANY:
        return tirx.bitwise_xor(value, tirx.const(-1, value.dtype)) + 1
    ones = tirx.const((1 << bound.max_value.bit_length()) - 1, value.dtype)
    return tirx.bitwise_and(tirx.bitwise_xor(value, ones), ones) - ones


def _is_complement(node: Any) -> bool:
    return isinstance(node, tirx.Call) and node.op.same_as(Op.get("tirx.bitwise_xor"))


def _takes_away(node: Any) -> bool:
    if isinstance(node, tirx.Sub):
        return constant(node.b) is None
    return isinstance(node, tirx.Mul) and any((constant(factor) or 0) < 0 for factor in (node.a, node.b))


def _is_division(node: Any) -> bool:
    return isinstance(node, _DIVISIONS)
