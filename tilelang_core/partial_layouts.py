# SPDX-License-Identifier: MIT
"""Layouts of fragments that have no place for elements which the function uses.

Why: TileLang may infer a layout from an operation on a part of a fragment, or from decreasing indices. Elements beyond
that part then share a place with others, or lie on threads that do not exist, and copies leave them out in silence.
Before: a function with inferred layouts. After: the same function. Raises ValueError where an access may touch such an
element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tilelang.layout import Fragment
from tvm import tirx

from tilelang_core import ir
from tilelang_core.accesses import BufferAccess, accesses_in, span
from tilelang_core.formulas import formula
from tilelang_core.loop_ranges import loop_ranges


def with_whole_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, whose fragments have a place for each element that is used. Raises ValueError: one has not."""
    threads = math.prod(_threads(func))
    partial = {
        tile: placed
        for tile, layout in ir.layout_map(func).items()
        if isinstance(layout, Fragment) and not (placed := _placed(layout, tile.shape, threads)).all()
    }
    if partial:
        ranges = {var: (extent.min, extent.extent) for var, extent in loop_ranges(func.body).items()}
        for access in accesses_in(func.body):
            if access.buffer in partial and not partial[access.buffer][_box(access, ranges)].all():
                raise ValueError(f"The layout of fragment {access.buffer.name} has no place for some elements")
    return func


def _threads(func: tirx.PrimFunc) -> Iterator[int]:
    """The numbers of threads of a block along each axis."""
    for stmt in ir.statements(func.body):
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent" and "threadIdx" in stmt.node.thread_tag:
            yield ir.integer(stmt.value)


def _placed(layout: Fragment, sizes: Sequence[Any], threads: int) -> np.ndarray:
    """Mask of the elements of a fragment that its layout gives a place of their own; all, if it is not known."""
    shape, extents = ir.constants(sizes), ir.constants(layout.get_input_shape())
    if shape is None:
        return np.ones(0, bool)
    placed = np.ones(shape, bool)
    variables = [getattr(v, "var", v) for v in layout.get_forward_vars()]
    found = [formula(e).function for e in (layout.thread, layout.get_linearized_forward_index())]
    functions = [function for function in found if function is not None]
    if extents is None or len(extents) != len(shape) or len(functions) < len(found):
        return placed
    known = dict.fromkeys(variables, 0) | dict(zip(variables[-len(shape) :], np.indices(shape), strict=True))
    try:
        thread, index = (np.broadcast_to(function(known), shape) for function in functions)
    except ValueError:  # a minimum or maximum
        return placed
    placed &= (thread >= 0) & (thread < threads)
    placed &= np.all([axis < n for axis, n in zip(np.indices(shape), extents, strict=True)], axis=0)
    places, candidates = (thread * (int(index.max()) + 1) + index).reshape(-1), np.flatnonzero(placed)
    _, first = np.unique(places[candidates], return_index=True)
    alone = np.zeros(placed.size, bool)
    alone[candidates[first]] = True
    return alone.reshape(shape)


def _box(access: BufferAccess, ranges: dict[tirx.Var, tuple[Any, Any]]) -> tuple[slice, ...]:
    """The box of elements that an access may touch."""
    if access.begins is None or access.extents is None:
        return ()
    bounds = (_bounds(b, e, ranges) for b, e in zip(access.begins, access.extents, strict=True))
    return tuple(slice(max(low, 0), high) for low, high in bounds)


def _bounds(begin: Any, extent: Any, ranges: dict[tirx.Var, tuple[Any, Any]]) -> tuple[int, int | None]:
    found = span(begin, extent, ranges)
    low, high = map(ir.constant, found) if found is not None else (None, None)
    return low or 0, high
