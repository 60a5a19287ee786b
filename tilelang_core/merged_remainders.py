# SPDX-License-Identifier: MIT
"""Indices with quotients and remainders of sums, in a form that stock TileLang's FlattenBuffer does not get wrong.

As of TileLang 0.1.15 IterMapSimplify merges `(i // 5 + 12) % 24 * 5 + (i % 5 + 3) % 5` to `(i + 60) % 120`: the 3 is
lost. A swizzled layout makes such an index of a constant row: `tile[7, j]` reads another column. It also merges
`i // 3 + (i + 1) // 3`, to `(i + 1) // 3 * 2 - 1`. Where it would change the value of an index, its remainders are
written as bit masks and truncated remainders, which are opaque to it; if that is not enough its quotients, too. All
other accesses keep the text that stock generates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.arith import Analyzer, iter_map_simplify
from tvm.error import InternalError
from tvm.ir import Range

from tilelang_core.ir import constant, contains, same, variables
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import rewritten, truncated_quotient, truncated_remainder, with_indices

_MOST, _UNKNOWN_EXTENT = 1 << 11, 1 << 10
"""Points at which values are compared, and extents that are not known there."""
_REMAINDERS, _DIVISIONS = (tirx.FloorMod,), (tirx.FloorMod, tirx.FloorDiv)
_BINARY: Mapping[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod, tirx.Min: np.minimum, tirx.Max: np.maximum,
}  # fmt: skip


def with_kept_remainders(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if FlattenBuffer would change an index's value one that computes the same."""
    ranges = loop_ranges(func.body)
    analyzer, offsets = analyzer_of(ranges), _Offsets(ranges)

    def leave(node: Any) -> Any:
        if not isinstance(node, tirx.BufferLoad | tirx.BufferStore) or not offsets.change(node):
            return None
        kept = with_indices(node, [_opaque(index, analyzer, _REMAINDERS) for index in node.indices])
        if not offsets.change(kept):
            return kept
        return with_indices(node, [_opaque(index, analyzer, _DIVISIONS) for index in node.indices])

    return rewritten(func, leave)


class _Offsets:
    """Offsets of accesses that were simplified: the stages of a ring are indexed alike in many statements."""

    def __init__(self, ranges: Mapping[tirx.Var, Range]) -> None:
        self._ranges, self._known = ranges, list[tuple[list[tirx.PrimExpr], bool]]()

    def change(self, node: tirx.BufferLoad | tirx.BufferStore) -> bool:
        """Whether IterMapSimplify changes the value of an access's offset, or fails on it."""
        if not any(contains(index, _is_remainder_of_sum) for index in node.indices):
            return False
        offsets = list(node.buffer.offset_of(node.indices))
        for known, changes in self._known:
            if len(known) == len(offsets) and all(map(same, known, offsets)):
                return changes
        self._known.append((offsets, _loses_value(offsets, self._ranges)))
        return self._known[-1][1]


def _loses_value(offsets: list[tirx.PrimExpr], ranges: Mapping[tirx.Var, Range]) -> bool:
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
    """Whether two expressions have the same value at all points, or at some drawn at random if there are too many."""
    points = _Points(sorted(used, key=lambda var: var.name), iters)
    wanted = points.values(one)
    defined = ~points.undefined
    found = points.values(other)
    differ = points.undefined | (wanted != found)
    return bool(defined.any()) and not bool((differ & defined).any())


class _Points:
    """Values of variables, and of expressions of these, at a number of points. `undefined`: the points where an
    expression so far divides by zero: sizes that no program runs with."""

    def __init__(self, used: Sequence[tirx.Var], iters: Mapping[tirx.Var, Range]) -> None:
        draw = np.random.default_rng(0)
        begins = [constant(iters[var].min) or 0 if var in iters else 0 for var in used]
        extents = [(constant(iters[var].extent) if var in iters else None) or _UNKNOWN_EXTENT for var in used]
        if (every := math.prod(extents)) <= _MOST:
            at = np.unravel_index(np.arange(every), extents) if used else []
        else:
            every, at = _MOST, [draw.integers(extent, size=_MOST) for extent in extents]
        self.undefined = np.zeros(every, dtype=bool)
        self._draw, self._others = draw, dict[str, np.ndarray]()
        self._known = {var: begin + place for var, begin, place in zip(used, begins, at, strict=True)}

    def values(self, expr: tirx.PrimExpr) -> np.ndarray:
        """The values of an expression; loads and calls have arbitrary but consistent ones."""
        if (compute := _BINARY.get(type(expr))) is not None:
            a, b = self.values(expr.a), self.values(expr.b)
            if isinstance(expr, _DIVISIONS):
                self.undefined |= b == 0
                b = np.where(b == 0, 1, b)
            return compute(a, b)
        if isinstance(expr, tirx.Var):
            return self._known[expr]
        if isinstance(expr, tirx.IntImm):
            return np.full(len(self.undefined), int(expr.value))
        if isinstance(expr, tirx.Cast):
            return self.values(expr.value)
        if str(expr) not in self._others:
            self._others[str(expr)] = self._draw.integers(_UNKNOWN_EXTENT, size=len(self.undefined))
        return self._others[str(expr)]


def _opaque(index: tirx.PrimExpr, analyzer: Analyzer, which: tuple[type, ...]) -> tirx.PrimExpr:
    """The index with remainders, and perhaps quotients, that IterMapSimplify leaves alone."""
    if isinstance(index, tirx.Cast):
        return tirx.Cast(index.dtype, _opaque(index.value, analyzer, which))
    if type(index) not in _BINARY:
        return index
    a, b = _opaque(index.a, analyzer, which), _opaque(index.b, analyzer, which)
    divisor = constant(b) if isinstance(index, which) else None
    if divisor is None or divisor < 1:
        return type(index)(a, b)
    by = tirx.const(divisor, a.dtype)
    is_mask, is_positive = divisor & (divisor - 1) == 0, analyzer.can_prove(index.a >= 0)
    if isinstance(index, tirx.FloorMod) and is_mask:
        return tirx.bitwise_and(a, tirx.const(divisor - 1, a.dtype))
    if isinstance(index, tirx.FloorMod):
        return tirx.truncmod(a, by) if is_positive else truncated_remainder(a, by)
    return tirx.truncdiv(a, by) if is_positive else truncated_quotient(a, by)
