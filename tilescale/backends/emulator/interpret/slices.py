# SPDX-License-Identifier: MIT
"""Accesses of a parallel loop as slices of arrays: most indices are a loop variable plus an offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler


class Slices:
    """Indices that are a parallel loop's variable plus an offset, or do not depend on the loops. `rank`: depth of the
    loop nest."""

    def __init__(self, rank: int, parts: Sequence[tuple[int | None, Closure | None]]):
        """`parts`: for each index the loop's axis (None: a scalar) and the closure of its offset (None: 0)."""
        self.rank = rank
        axes = [axis for axis, _ in parts if axis is not None]
        self._absent = [axis for axis in range(rank) if axis not in axes]
        # Where axes follow one another a single index expression does it, with new axes for loops that no index depends
        # on.
        self._order = None if axes == sorted(axes) else sorted(range(len(axes)), key=axes.__getitem__)
        self._spread = tuple(slice(None) if axis in axes else None for axis in range(rank))
        self._blank: list[Any] = []
        self._places: list[tuple[int, int | None, Closure | None]] = []
        new = [] if self._order else [*self._absent]
        for axis, offset in parts:
            while axis is not None and new and new[0] < axis:
                self._blank.append(None)
                del new[0]
            self._places.append((len(self._blank), axis, offset))
            self._blank.append(0)
        self._blank += [None] * len(new)

    def view(self, array: Any, frame: Frame, write: bool = False) -> np.ndarray | None:
        """The elements as a view over the space, or None where a slice cannot express the access."""
        if not isinstance(array, np.ndarray):
            return None
        space, index = frame.space, self._blank.copy()
        for (place, axis, offset), extent in zip(self._places, array.shape, strict=True):
            begin = 0 if offset is None else offset(frame)
            if is_vector(begin) or begin < 0:
                return None
            end = begin + (1 if axis is None else space[axis])
            if end > extent:
                return None
            index[place] = begin if axis is None else slice(begin, end)
        if write and any(space[axis] != 1 for axis in self._absent):
            return None
        view = array[tuple(index)]
        return view if self._order is None else view.transpose(self._order)[self._spread]


class Strides:
    """Indices that are sums of multiples of parallel loops' variables, plus offsets: `bx * 32 + i`. `rank`: depth of
    the loop nest."""

    def __init__(self, rank: int, parts: Sequence[tuple[dict[int, int], Closure | None]]):
        """`parts`: for each index the step along each axis of the nest, and the closure of its offset (None: 0)."""
        self.rank = rank
        self._parts = [(tuple(steps.items()), offset) for steps, offset in parts]

    def view(self, array: Any, frame: Frame, write: bool = False) -> np.ndarray | None:
        """The elements as a view over the space, or None where strides cannot express the access."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            return None
        space, strides, place = frame.space, [0] * self.rank, 0
        for (steps, offset), extent, stride in zip(self._parts, array.shape, array.strides, strict=True):
            begin = 0 if offset is None else offset(frame)
            if is_vector(begin) or begin < 0:
                return None
            place += begin * stride
            for axis, step in steps:
                begin += step * (space[axis] - 1)
                strides[axis] += step * stride
            if begin >= extent:
                return None
        if write and not _are_distinct(space, strides):
            return None
        shape = tuple(n if stride else 1 for n, stride in zip(space, strides, strict=True))
        return np.ndarray(shape, array.dtype, array, place, strides)


def _are_distinct(space: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether all elements of a view are different ones: each stride steps over all that smaller ones reach."""
    reach = 0
    for stride, n in sorted(zip(strides, space, strict=True)):
        if n > 1 and stride <= reach:
            return False
        reach += stride * (n - 1)
    return True


def slices(compiler: Compiler, indices: Sequence[Any]) -> Slices | Strides | None:
    """The indices as slices or strides over the enclosing parallel loops; None where they are neither."""
    if not compiler.axes or not compiler.sliceable or any(not isinstance(i, ir.PrimExpr | int) for i in indices):
        return None
    sums = [found for i in indices if (found := _sum(compiler, i)) is not None]
    if len(sums) < len(indices):
        return None
    rank, steps = len(set(compiler.axes.values())), [steps for steps, _ in sums]
    parts = [(steps, None if offset is None else compiler.expr(offset)) for steps, offset in sums]
    axes = [axis for of_one in steps for axis in of_one]
    if all(len(s) <= 1 and set(s.values()) <= {1} for s in steps) and len(set(axes)) == len(axes):
        return Slices(rank, [(next(iter(s), None), offset) for s, offset in parts])
    return Strides(rank, parts)


def _sum(compiler: Compiler, index: Any) -> tuple[dict[int, int], Any] | None:
    """An index as the step along each axis and the rest (None: 0), if it is such a sum with positive steps."""
    if not any(var in compiler.axes for var in ir.variables(index)):
        return {}, index
    if isinstance(index, ir.Var):
        return {compiler.axes[index]: 1}, None
    if isinstance(index, ir.Add):
        one, two = _sum(compiler, index.a), _sum(compiler, index.b)
        if one is None or two is None:
            return None
        (steps, offset), (more, other) = one, two
        steps = steps | {axis: step + steps.get(axis, 0) for axis, step in more.items()}
        return steps, offset if other is None else other if offset is None else offset + other
    if isinstance(index, ir.Sub) and not any(var in compiler.axes for var in ir.variables(index.b)):
        found = _sum(compiler, index.a)
        return found and (found[0], (0 if found[1] is None else found[1]) - index.b)
    if isinstance(index, ir.Mul):
        for factor, of in ((index.a, index.b), (index.b, index.a)):
            found = _sum(compiler, of) if isinstance(factor, ir.IntImm) and int(factor) > 0 else None
            if found is not None:
                steps, offset = found
                n = int(factor)
                return {axis: n * step for axis, step in steps.items()}, None if offset is None else offset * factor
    return None
