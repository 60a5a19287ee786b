# SPDX-License-Identifier: MIT
"""Memory of units: the content of fresh memory, and thread-private buffers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.frame import Frame, is_vector, spread
from tilescale.backends.emulator.numerics import convert
from tilescale.errors import UnsupportedError


def poison(dtype: np.dtype) -> Any:
    """Fill value of fresh memory: NaN, or an unlikely pattern."""
    if dtype.kind == "b":
        return False
    if dtype.kind in "iu":
        return np.frombuffer(b"\xcd" * dtype.itemsize, dtype)[0]
    return convert(float("nan"), dtype)


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Fresh memory."""
    return np.full(shape, poison(dtype), dtype)


def meta_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of that shape without data: all elements share one read-only element."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class Assumed(np.ndarray):
    """Read-only values that a run without data assumes."""


def assumed(values: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> Assumed:
    """An array of that shape with assumed values; one value holds for all elements."""
    array = np.broadcast_to(convert(values, dtype), shape).copy().view(Assumed)
    array.flags.writeable = False
    return array


def address(flag: np.ndarray) -> int:
    """A flag's address, which identifies it."""
    return flag.__array_interface__["data"][0]


class PrivateBuffer:
    """A thread-private buffer: one instance while all elements of the space agree, else one for each."""

    __slots__ = ("__weakref__", "data", "known", "lead", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, poison: Any):
        self.shape = shape
        # False in runs without data where the stored value depended on data.
        self.known = True
        self.lead: tuple[int, ...] = ()
        self.data = np.full(shape, poison, dtype)

    def load(self, index: tuple, frame: Frame) -> Any:
        """The element at `index` for every element of the space."""
        if not self.lead:
            if not any(is_vector(i) for i in index):
                return self.data[index]
            return self.data[tuple(np.asarray(i) for i in index)]
        if self.lead != frame.space:
            return self._agreed(index)
        return self.data[(*np.ogrid[tuple(slice(n) for n in self.lead)], *index)]

    def store(self, index: tuple, value: Any, frame: Frame) -> None:
        """Assign on the active elements."""
        vector = is_vector(value) or any(is_vector(i) for i in index)
        if not self.lead and not vector and frame.mask is None:
            self.data[index] = value
            return
        self.part(frame)
        grid = np.ogrid[tuple(slice(n) for n in self.lead)]
        if frame.mask is None:
            self.data[(*grid, *index)] = value
            return
        mask = np.broadcast_to(frame.mask, self.lead)
        where = tuple(np.broadcast_to(np.asarray(i), self.lead)[mask] for i in (*grid, *index))
        self.data[where] = spread(value, frame)[mask]

    def part(self, frame: Frame) -> None:
        """Give every element of the space its own instance, where all share one."""
        if self.lead and self.lead != frame.space:
            self._settle()
        if not self.lead:
            self.data = np.broadcast_to(self.data, (*frame.space, *self.shape)).copy()
            self.lead = frame.space

    def _agreed(self, index: tuple) -> Any:
        """The value that all elements of the space where it was written hold. Raises UnsupportedError: they differ, and
        which of them a reader elsewhere sees is up to the compiler."""
        every: tuple[Any, ...] = (..., *(np.asarray(i) for i in index))
        picked = self.data[every]
        values = np.ascontiguousarray(picked.reshape(math.prod(self.lead), -1))
        if (values.view(np.uint8) != values[:1].view(np.uint8)).any():
            raise UnsupportedError(
                f"a thread-private value was written for {' x '.join(map(str, self.lead))} threads or iterations, "
                "differs between them, and is read where others run",
                hint="keep it in shared memory or a fragment, or read it in the loop that wrote it",
            )
        self._settle()
        return self.data[tuple(np.asarray(i) for i in index)]

    def _settle(self) -> None:
        """Before writes in another space: the rest keeps its last element's value."""
        self.data = self.data[tuple(-1 for _ in self.lead)].copy()
        self.lead = ()
