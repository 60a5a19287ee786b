# SPDX-License-Identifier: MIT
"""Accesses of a parallel loop as slices of arrays: most indices are a loop variable plus an offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.expr import Closure


@dataclass(frozen=True)
class Slices:
    """Indices that are a parallel loop's variable plus an offset, or do not depend on the loops.

    Attributes:
        rank: how many loops the nest has.
        parts: for each index the loop's axis (None: a scalar) and the closure of its offset.
    """

    rank: int
    parts: tuple[tuple[int | None, Closure], ...]

    def view(self, array: np.ndarray, frame: Frame, write: bool = False) -> np.ndarray | None:
        """The elements as a view over the space, or None where a slice cannot express the access."""
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
