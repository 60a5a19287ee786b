# SPDX-License-Identifier: MIT
"""Shadow memory: one cell for each element of a program's memory, shared by all views of the memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from tilescale.backends.emulator.checks.text import Box
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.interpret.buffers import Home


class Shadow:
    """The cells of one piece of memory.

    Attributes:
        owner: an array over the whole of it.
        cells: one for each `grain` bytes from its first to its last element, 0 at first.
        mixed: whether it has been viewed with types of several widths.
    """

    def __init__(self, owner: np.ndarray, dtype: Any):
        self._owner = weakref.ref(owner)
        self._begin, end = np.lib.array_utils.byte_bounds(owner)
        self.grain = owner.itemsize
        self.cells = np.zeros((end - self._begin) // self.grain, dtype)
        self.mixed = False

    @property
    def owner(self) -> np.ndarray:
        """The array that the shadow was made for."""
        owner = self._owner()
        assert owner is not None, "the shadow of memory that is gone"
        return owner

    def view(self, array: np.ndarray) -> np.ndarray:
        """The cells of the elements of a view of the memory, with the same indices; where an element has several cells,
        these are one more dimension."""
        self._fit(array)
        return self._view(self.cells, array)

    def numbers(self, array: np.ndarray) -> np.ndarray:
        """The numbers of these cells."""
        self._fit(array)
        return self._view(self._all, array)

    @cached_property
    def _all(self) -> np.ndarray:
        return np.arange(self.cells.size)

    def _fit(self, array: np.ndarray) -> None:
        self.mixed = self.mixed or array.itemsize != self.grain
        while array.itemsize % self.grain:
            self._refine()

    def _view(self, cells: np.ndarray, array: np.ndarray) -> np.ndarray:
        grain, size = self.grain, cells.itemsize
        offset = (array.__array_interface__["data"][0] - self._begin) // grain * size
        shape, strides = array.shape, tuple([s // grain * size for s in array.strides])
        if array.itemsize != grain:
            shape, strides = (*shape, array.itemsize // grain), (*strides, size)
        return np.ndarray(shape, cells.dtype, cells, offset, strides)

    def _refine(self) -> None:
        """Elements smaller than a cell: a cell becomes two."""
        self.cells = np.repeat(self.cells, 2)
        self.__dict__.pop("_all", None)
        self.grain //= 2

    def box(self, array: np.ndarray, index: Any, hit: np.ndarray) -> Box:
        """The smallest box of indices of the owner, begin and end along each dimension, around some elements.

        Args:
            array, index: an access.
            hit: mask of the cells of the access.
        """
        return self.around(np.asarray(self.numbers(array)[index])[hit])

    def around(self, numbers: np.ndarray) -> Box:
        """The smallest box around the elements of some cells."""
        chosen = np.zeros(self.cells.size, bool)
        chosen[numbers] = True
        found = self._view(chosen, self.owner)
        found = np.asarray(found.any(axis=-1)) if found.ndim > self.owner.ndim else found
        places = np.nonzero(found) if found.ndim else ()
        return [(int(axis.min()), int(axis.max()) + 1) for axis in places]


S = TypeVar("S", bound=Shadow)


class Memory(Generic[S]):
    """The shadows of all accessed memory."""

    def __init__(self, make: Callable[[np.ndarray, bool], S]):
        """`make` makes the shadow of an array; its second argument says whether the memory existed before the run."""
        self._make = make
        self._shadows: dict[int, tuple[weakref.ref, S]] = {}
        self._given: dict[tuple, S] = {}

    def of(self, array: np.ndarray) -> S:
        """The shadow of the memory that an array lies in."""
        base = array.base
        while isinstance(base, np.ndarray):
            array, base = base, base.base
        found = self._shadows.get(id(array))
        return found[1] if found is not None else self._add(array)

    def _add(self, owner: np.ndarray) -> S:
        number = id(owner)
        if owner.base is None:
            shadow = self._make(owner, False)
        else:  # An argument: several may be one tensor.
            where = (owner.__array_interface__["data"][0], owner.shape, owner.strides, owner.itemsize)
            if where not in self._given:
                self._given[where] = self._make(owner, True)
            shadow = self._given[where]
        self._shadows[number] = weakref.ref(owner, lambda _: self._shadows.pop(number, None)), shadow
        return shadow

    def __iter__(self) -> Iterator[S]:
        return (shadow for _, shadow in self._shadows.values())


def touched_cells(frame: Frame, home: Home, numbers: np.ndarray, index: Any, items: np.ndarray) -> np.ndarray:
    """The cell that each of some threads, iterations, or elements of a tile touches; fewer cells where one touches none
    or several."""
    if home.of_tile or (isinstance(index, tuple) and index):
        cells = np.asarray(numbers[index])
        return cells.reshape(-1) if cells.ndim else np.broadcast_to(cells, items.shape)
    if any(n not in (1, m) for n, m in itertools.zip_longest(numbers.shape, frame.space)):
        return np.empty(0, int)
    return np.broadcast_to(numbers, frame.space).reshape(-1)[items]
