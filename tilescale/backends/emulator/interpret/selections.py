# SPDX-License-Identifier: MIT
"""Block-cyclic shares of a tile: strides cannot describe their rows, so accesses use index lists."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from tilescale.errors import UnsupportedError


class Selection:
    """Some indices of an array along one axis, in any order. It is indexed as an array of its shape is.

    Attributes:
        array: the array of its elements.
        axis, chosen: the axis, and the selected indices along it.
    """

    def __init__(self, array: np.ndarray, axis: int, chosen: np.ndarray):
        self.array, self.axis, self.chosen = array, axis, chosen
        self.shape = (*array.shape[:axis], len(chosen), *array.shape[axis + 1 :])
        self.ndim, self.size = array.ndim, math.prod(self.shape)
        self.dtype, self.itemsize, self.flags = array.dtype, array.itemsize, array.flags

    def behind(self, index: Any = ()) -> tuple:
        """The index into `array` for an index of numbers or arrays, or of slices: then one array for each axis."""
        index = () if index is Ellipsis else index
        if index and not any(isinstance(i, slice) for i in index):
            return (*index[: self.axis], self.chosen[index[self.axis]], *index[self.axis + 1 :])
        every = [*index, *[slice(None)] * (self.ndim - len(index))]
        ranges = [self.chosen if axis == self.axis else np.arange(n) for axis, n in enumerate(self.array.shape)]
        return np.ix_(*(numbers[part] for numbers, part in zip(ranges, every, strict=True)))

    def __getitem__(self, index: Any) -> Any:
        """Elements; for slices a selection."""
        if not all(isinstance(i, slice) for i in index):
            return self.array[self.behind(index)]
        around = tuple(slice(None) if axis == self.axis else part for axis, part in enumerate(index))
        part = index[self.axis] if len(index) > self.axis else slice(None)
        return Selection(self.array[around], self.axis, self.chosen[part])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[self.behind(index)] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array[self.behind()].astype(dtype or self.dtype, copy=False)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"a block-cyclic view of a tile on chip, where the emulator needs one array ({name})",
            hint="copy the view into a tile of its own with T.copy, and back",
        )


def located(array: Any, index: Any = ()) -> tuple[np.ndarray, Any]:
    """The array that holds the elements of an array or a selection, and their index in it."""
    return (array.array, array.behind(index)) if isinstance(array, Selection) else (array, index)


def block_cyclic(tile: Any, axis: int, block: int, rank: int, size: int) -> Selection:
    """The share of unit `rank` of `size` in a tile distributed block-cyclically along an axis. Raises UnsupportedError:
    the tile is distributed along another axis already."""
    chosen = np.arange(tile.shape[axis]).reshape(-1, size, block)[:, rank].reshape(-1)
    if not isinstance(tile, Selection):
        return Selection(tile, axis, chosen)
    if tile.axis != axis:
        raise UnsupportedError(
            f"a tile on chip in blocks along dimension {tile.axis} and along dimension {axis}",
            hint="view it in whole or cyclic shares along one of them: T.Shard(dim), T.Shard(dim, block=1)",
        )
    return Selection(tile.array, axis, tile.chosen[chosen])
