# SPDX-License-Identifier: MIT
"""Views of memory as another type where one of the two has four bits. The emulator stores a four-bit element in a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from tilescale.backends.emulator.interpret.addresses import placed
from tilescale.backends.emulator.numerics import is_half_byte
from tilescale.errors import ShapeError, UnsupportedError


class Packed:
    """Elements of one type in memory of another: each is several stored elements, or half a byte of one.

    It is indexed as an array of its shape is; slices give another view.

    Attributes:
        held: the stored elements, one-dimensional; four-bit elements, or bytes.
        numbers: the view's element numbers, counted from the begin of the memory.
    """

    def __init__(self, held: np.ndarray, dtype: np.dtype, numbers: np.ndarray):
        self.held, self.dtype, self.numbers = held, dtype, numbers
        self.shape, self.ndim, self.size = numbers.shape, numbers.ndim, numbers.size
        self.itemsize, self.flags = dtype.itemsize, held.flags
        self._is_half = is_half_byte(dtype)

    def memory(self, index: Any = ()) -> tuple[np.ndarray, Any]:
        """The array in which elements of the view are, and their index there."""
        numbers = self.numbers[index]
        if self._is_half:
            return self.held, (numbers >> 1,)
        count = 2 * self.dtype.itemsize
        return self.held, (numbers[..., None] * count + np.arange(count),)

    def __getitem__(self, index: Any) -> Any:
        """Elements; for slices a view."""
        if index is Ellipsis or (isinstance(index, tuple) and all(isinstance(i, slice) for i in index)):
            return Packed(self.held, self.dtype, self.numbers[index])
        return self._load(index)

    def _load(self, index: Any) -> np.ndarray:
        held, where = self.memory(index)
        if self._is_half:
            return (held[where] >> 4 * (self.numbers[index] & 1) & 0xF).astype(np.uint8).view(self.dtype)
        halves = held.view(np.uint8)[where] & 0xF
        return np.ascontiguousarray(halves[..., ::2] | halves[..., 1::2] << 4).view(self.dtype)[..., 0][()]

    def __setitem__(self, index: Any, value: Any) -> None:
        held, (where,) = self.memory(index)
        if not self._is_half:
            value = np.broadcast_to(np.asarray(value, self.dtype), where.shape[:-1])
            given = np.ascontiguousarray(value)[..., None].view(np.uint8)
            held.view(np.uint8)[where] = np.stack([given & 0xF, given >> 4], axis=-1).reshape(where.shape)
            return
        upper = self.numbers[index] & 1
        given = np.broadcast_to(np.asarray(value, self.dtype).view(np.uint8) & 0xF, upper.shape)
        for half in (0, 1):  # one after the other: two may share a byte
            mine = upper == half
            held[where[mine]] = held[where[mine]] & 0xF0 >> 4 * half | given[mine] << 4 * half

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._load(()).astype(dtype or self.dtype, copy=False)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"an operation on a view as {self.dtype} of memory in which elements of four bits lie ({name})",
            hint="copy the view into a tile of its own with T.copy, and back",
        )


def seen_as(flat: np.ndarray, name: str, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype) -> Any:
    """The content of memory from its begin, viewed as elements of another type and shape.

    Args:
        flat: all elements in the memory, one-dimensional and contiguous.
        strides: in elements of the view.

    Raises:
        ShapeError: the memory ends before the view does.
    """
    steps = zip(shape, strides, strict=True)
    reach = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in steps)
    need, there = reach * _bits(dtype), flat.size * _bits(flat.dtype)
    if need > there:
        raise ShapeError(
            f"a view of {name!r} as {dtype} of shape {tuple(shape)} takes {need} bits, there are {there}",
            hint="view it in a shape that takes as many bits as it has",
        )
    if is_half_byte(dtype) == is_half_byte(flat.dtype):
        return placed(flat.view(np.uint8), name, shape, strides, dtype)
    held = flat.view(np.uint8) if is_half_byte(dtype) else flat
    axes = np.indices(shape, sparse=True)
    return Packed(held, dtype, sum((n * step for n, step in zip(axes, strides, strict=True)), np.array(0)))


def _bits(dtype: np.dtype) -> int:
    return 4 if is_half_byte(dtype) else 8 * dtype.itemsize
