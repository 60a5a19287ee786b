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
    """Indices that are a parallel loop's variable plus an offset, or do not depend on the loops.

    Attributes:
        rank: depth of the loop nest.
    """

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


def slices(compiler: Compiler, indices: Sequence[Any]) -> Slices | None:
    """The indices as slices over the enclosing parallel loops, if each is a loop variable plus an offset."""
    if not compiler.axes or not compiler.sliceable or any(not isinstance(i, ir.PrimExpr | int) for i in indices):
        return None
    parts = [_slice(compiler, i) for i in indices]
    axes = [axis for part in parts if part is not None for axis in [part[0]] if axis is not None]
    if None in parts or len(set(axes)) != len(axes):
        return None
    return Slices(len(set(compiler.axes.values())), parts)


def _slice(compiler: Compiler, index: Any) -> tuple[int | None, Closure | None] | None:
    if not any(var in compiler.axes for var in ir.variables(index)):
        return None, compiler.expr(index)
    if isinstance(index, ir.Var):
        return compiler.axes[index], None
    if isinstance(index, ir.Add):
        for var, rest in ((index.a, index.b), (index.b, index.a)):
            free = not any(v in compiler.axes for v in ir.variables(rest))
            if isinstance(var, ir.Var) and var in compiler.axes and free:
                return compiler.axes[var], compiler.expr(rest)
    return None
