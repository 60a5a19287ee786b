# SPDX-License-Identifier: MIT
"""Accesses of a parallel loop as slices of arrays: most indices are a loop variable plus an offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler


@dataclass(frozen=True)
class Slices:
    """Indices that are a parallel loop's variable plus an offset, or do not depend on the loops.

    Attributes:
        rank: how many loops the nest has.
        parts: for each index the loop's axis (None: a scalar) and the closure of its offset.
    """

    rank: int
    parts: tuple[tuple[int | None, Closure], ...]

    def view(self, array: Any, frame: Frame, write: bool = False) -> np.ndarray | None:
        """The elements as a view over the space, or None where a slice cannot express the access."""
        if not isinstance(array, np.ndarray):
            return None
        index: list[Any] = []
        axes: list[int] = []
        for (axis, offset), extent in zip(self.parts, array.shape, strict=True):
            begin = offset(frame)
            length = 1 if axis is None else frame.space[axis]
            if is_vector(begin) or begin < 0 or begin + length > extent:
                return None
            if axis is None:
                index.append(begin)
            else:
                index.append(slice(begin, begin + length))
                axes.append(axis)
        if write and any(a not in axes and n != 1 for a, n in enumerate(frame.space)):
            return None
        view = array[tuple(index)] if axes else array[(*index, ...)]  # A view, also of one element.
        order = sorted(range(len(axes)), key=axes.__getitem__)
        if order != list(range(len(axes))):
            view = view.transpose(order)
        return view[tuple(slice(None) if a in axes else None for a in range(self.rank))]


def slices(compiler: Compiler, indices: Sequence[Any]) -> Slices | None:
    """The indices as slices over the parallel loops around them, if they are that simple."""
    if not compiler.axes or not compiler.sliceable or any(not isinstance(i, ir.PrimExpr | int) for i in indices):
        return None
    parts = [_slice(compiler, i) for i in indices]
    axes = [axis for part in parts if part is not None for axis in [part[0]] if axis is not None]
    if None in parts or len(set(axes)) != len(axes):
        return None
    return Slices(len(set(compiler.axes.values())), tuple(parts))


def _slice(compiler: Compiler, index: Any) -> tuple[int | None, Closure] | None:
    if not any(var in compiler.axes for var in ir.variables(index)):
        return None, compiler.expr(index)
    if isinstance(index, ir.Var):
        return compiler.axes[index], lambda frame: 0
    if isinstance(index, ir.Add):
        for var, rest in ((index.a, index.b), (index.b, index.a)):
            free = not any(v in compiler.axes for v in ir.variables(rest))
            if isinstance(var, ir.Var) and var in compiler.axes and free:
                return compiler.axes[var], compiler.expr(rest)
    return None
