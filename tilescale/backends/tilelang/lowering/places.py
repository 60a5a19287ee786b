# SPDX-License-Identifier: MIT
"""Whether two stores write the same element, where no prover separates their indices.

Why: persistent loops derive tiles from swizzled indices, and no prover can handle the quotients and remainders that
keep the tiles of two iterations disjoint. So indices are evaluated for a random sample of iterations: a collision
outside of the sample is missed. Stores whose indices depend on memory count as colliding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tilelang_core import ir
from tilelang_core.formulas import one
from tilescale.program.effects import Access
from tilescale.program.extents import evaluate
from tilescale.program.regions import BoundVariables

_ITERATIONS = 64
"""Iterations of a loop that values are drawn from: rings of slots repeat sooner."""

_SAMPLES = 192
"""Draws of all variables."""

_SIZE = 1 << 14
"""Value assumed for a symbolic size: larger than the evaluated iterations reach."""


def collide(
    a: Access, inside_a: BoundVariables, b: Access, inside_b: BoundVariables, around: Mapping[ir.Var, tuple[Any, Any]]
) -> bool:
    """Whether two stores collide in the sample. `around`: program indices and loops, each with its begin and extent."""
    sides = [_box(a, inside_a), _box(b, inside_b)]
    if any(pair is None or not all(map(ir.is_pure, pair)) for box in sides for pair in box):
        return True
    boxes = list(zip(*sides, strict=True))
    ranges = {**around, **_enclosing_loops(inside_a), **_enclosing_loops(inside_b)}
    used = {v for box in sides for pair in box for bound in pair for v in ir.variables(bound)}
    fixed = dict.fromkeys(map(one, used - ranges.keys()), _SIZE)
    draw = random.Random(0)
    drawn = (_drawn(ranges, fixed, draw) for _ in range(_SAMPLES))
    return any(_collide_at(boxes, values) for values in drawn if values is not None)


def _box(access: Access, inside: BoundVariables) -> list[Any]:
    """Begin and end along each dimension of a statement's stores in one iteration."""
    own = {var: over for var, over in inside.ranges.items() if var in inside.names}
    if access.begins is None or access.extents is None:
        return [None]
    pairs = list(zip(access.begins, access.extents, strict=True))
    if not any(ir.variables(expr) & inside.names for pair in pairs for expr in pair):
        return [(begin, begin + extent) for begin, extent in pairs]
    return list(BoundVariables(own, inside.values, inside.names, inside.steady).bounds(access))


def _enclosing_loops(inside: BoundVariables) -> dict[ir.Var, tuple[Any, Any]]:
    return {var: over for var, over in inside.ranges.items() if var not in inside.names}


def _drawn(
    ranges: Mapping[ir.Var, tuple[Any, Any]], fixed: Mapping[ir.Var, int], draw: random.Random
) -> dict[ir.Var, int] | None:
    """Draw a value for each variable of `ranges`, in order: later ranges may depend on it. None if a range is empty."""
    values = dict(fixed)
    for var, (begin, extent) in ranges.items():
        first, count = evaluate(begin, values) or 0, evaluate(extent, values)
        if count is not None and count < 1:
            return None
        values[one(var)] = first + draw.randrange(_ITERATIONS if count is None else min(count, _ITERATIONS))
    return values


def _collide_at(boxes: Sequence[Any], values: Mapping[ir.Var, int]) -> bool:
    """Whether two boxes intersect for these values of their variables; True where a bound stays unknown."""
    for box in boxes:
        (begin, end), (first, last) = ([evaluate(bound, values) for bound in pair] for pair in box)
        if begin is None or end is None or first is None or last is None:
            return True
        if end <= first or last <= begin:
            return False
    return True
