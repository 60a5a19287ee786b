# SPDX-License-Identifier: MIT
"""Indices with several remainders of sums, in a form that stock TileLang's FlattenBuffer does not get wrong.

As of TileLang 0.1.15 IterMapSimplify merges `(i // 5 + 12) % 24 * 5 + (i % 5 + 3) % 5` to `(i + 60) % 120`: the 3 is
lost. A swizzled layout makes such an index of a constant row: `tile[7, j]` reads another column. Where IterMapSimplify
would change the value of an index, its remainders are written as bit masks and truncated remainders, which are opaque
to it. All other accesses keep the text that stock generates.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.arith import Analyzer, iter_map_simplify
from tvm.error import InternalError
from tvm.ir import Range

from tilelang_core.ir import constant, contains, variables
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import rewritten, with_indices

_Point = dict[Any, int]
_Value = Callable[[_Point], int]

_SAMPLES, _UNKNOWN_EXTENT = 24, 1 << 10
_BINARY: Mapping[type, Callable[[int, int], int]] = {
    tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul, tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod, tirx.Min: min, tirx.Max: max,
}  # fmt: skip


def with_kept_remainders(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if FlattenBuffer would change an index's value one that computes the same."""
    ranges = loop_ranges(func.body)
    analyzer = analyzer_of(ranges)

    def leave(node: Any) -> Any:
        if not isinstance(node, tirx.BufferLoad | tirx.BufferStore) or not _loses_value(node, ranges):
            return None
        return with_indices(node, [_opaque(index, analyzer) for index in node.indices])

    return rewritten(func, leave)


def _loses_value(node: tirx.BufferLoad | tirx.BufferStore, ranges: Mapping[tirx.Var, Range]) -> bool:
    """Whether IterMapSimplify changes the value of an access's offset, or fails on it."""
    if not any(contains(index, _is_remainder_of_sum) for index in node.indices):
        return False
    offsets = list(node.buffer.offset_of(node.indices))
    used = {var for offset in offsets for var in variables(offset)}
    iters = {var: ranges[var] for var in used if var in ranges}
    try:
        simplified = iter_map_simplify(offsets, iters, True, "surjective")
    except InternalError:  # it divides by zero for `i % 2 - (i % 2 + 1) % 2`
        return True
    return any(not _agree(*pair, used, iters) for pair in zip(offsets, simplified, strict=True))


def _is_remainder_of_sum(node: Any) -> bool:
    return isinstance(node, tirx.FloorMod | tirx.FloorDiv) and isinstance(node.a, tirx.Add | tirx.Sub)


def _agree(one: tirx.PrimExpr, other: tirx.PrimExpr, used: set[tirx.Var], iters: Mapping[tirx.Var, Range]) -> bool:
    """Whether two expressions have the same value at points drawn at random: most points show a lost term."""
    draw, compared = random.Random(0), False
    mine, others = _function(one), _function(other)
    for _ in range(_SAMPLES):
        point: _Point = {}
        for var in sorted(used, key=lambda var: var.name):
            begin, extent = (iters[var].min, iters[var].extent) if var in iters else (0, _UNKNOWN_EXTENT)
            point[var] = (constant(begin) or 0) + draw.randrange(constant(extent) or _UNKNOWN_EXTENT)
        wanted = _defined(mine, point)
        if wanted is None:
            continue
        if _defined(others, point) != wanted:
            return False
        compared = True
    return compared


def _defined(value: _Value, point: _Point) -> int | None:
    """The value of an expression at a point, None where it divides by zero: a size that no program runs with."""
    try:
        return value(point)
    except ZeroDivisionError:
        return None


def _function(expr: tirx.PrimExpr) -> _Value:
    """The value of an expression as a function of a point; loads and calls have arbitrary but consistent values."""
    if (compute := _BINARY.get(type(expr))) is not None:
        a, b = _function(expr.a), _function(expr.b)
        return lambda point: compute(a(point), b(point))
    if isinstance(expr, tirx.Var):
        return lambda point: point[expr]
    if isinstance(expr, tirx.IntImm):
        number = int(expr.value)
        return lambda point: number
    if isinstance(expr, tirx.Cast):
        return _function(expr.value)
    text = str(expr)
    return lambda point: point.setdefault(text, len(point))


def _opaque(index: tirx.PrimExpr, analyzer: Analyzer) -> tirx.PrimExpr:
    """The index with remainders that IterMapSimplify leaves alone."""
    if isinstance(index, tirx.Cast):
        return tirx.Cast(index.dtype, _opaque(index.value, analyzer))
    if type(index) not in _BINARY:
        return index
    a, b = _opaque(index.a, analyzer), _opaque(index.b, analyzer)
    divisor = constant(b) if isinstance(index, tirx.FloorMod) else None
    if divisor is None or divisor < 1:
        return type(index)(a, b)
    if divisor & (divisor - 1) == 0:
        return tirx.bitwise_and(a, tirx.const(divisor - 1, a.dtype))
    by = tirx.const(divisor, a.dtype)
    return tirx.truncmod(a if analyzer.can_prove(index.a >= 0) else tirx.truncmod(a, by) + by, by)
