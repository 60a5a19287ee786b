# SPDX-License-Identifier: MIT
"""Accesses to single elements of buffers, for all elements of the space at once.

As stock TileLang compiles them, accesses to global memory are guarded: a load outside the tensor yields the safe value
(0), a store is dropped, and the report lists accesses wholly out of bounds. TileLang does not guard constant indices:
those out of bounds, and accesses outside a tile in shared memory or registers, are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector, spread
from tilescale.backends.emulator.execute.lockstep import Outside
from tilescale.backends.emulator.execute.memory import Assumed, PrivateBuffer
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.slices import slices
from tilescale.backends.emulator.numerics import convert
from tilescale.errors import NoDataError, OutOfBoundsError

_A_NUMBER = "TileLang does not guard an index that is a number; a negative one counts from the end"


class Element:
    """One element of a buffer for each element of the space."""

    def __init__(self, compiler: Compiler, buffer: ir.Buffer, indices: Sequence[Any]):
        self.home = Home(compiler, buffer)
        self.indices = [compiler.expr(i) for i in indices]
        # Inside T.Parallel most indices are `loop variable + offset`: those accesses are slices.
        self.slices = None if self.home.private else slices(compiler, indices)
        numbers = [(axis, ir.constant(i)) for axis, i in enumerate(indices)] if self.home.guarded else []
        self.unguarded = [(axis, number) for axis, number in numbers if number is not None]

    # -- load ---------------------------------------------------------------------------------------------------------

    def load(self, frame: Frame) -> Any:
        """The elements' values."""
        array = self.home.array(frame)
        if self.slices is not None and len(frame.space) == self.slices.rank:
            view = self.slices.view(array, frame)
            if view is not None:
                if self.home.watched_by(frame):
                    self.home.touched(frame, READ, view, _active_part(view, frame))
                return view
        index = tuple(i(frame) for i in self.indices)
        if self.home.private:
            return python_int(self.at(array, index, frame))
        if not any(is_vector(i) for i in index):
            if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
                self.home.touched(frame, READ, array, index)
                return python_int(array[index])
            if frame.mask is None or frame.mask.any():
                self._missed_one(index, array.shape, frame)
            return self.home.safe
        return self._gather(array, index, frame)

    def _gather(self, array: np.ndarray, index: tuple, frame: Frame) -> np.ndarray:
        inside = self.inside(index, array.shape, frame)
        self.touched(frame, READ, array, index, inside)
        if inside is True:
            return array[index]
        safe = tuple(np.where(inside, spread(i, frame), 0) for i in index)
        if 0 in array.shape:
            return np.broadcast_to(np.asarray(self.home.safe, array.dtype), frame.space)
        return np.where(inside, array[safe], self.home.safe)

    def at(self, array: np.ndarray | PrivateBuffer, index: tuple, frame: Frame) -> Any:
        """The values at an index given by arrays."""
        if not isinstance(array, PrivateBuffer):
            return self._gather(array, index, frame)
        self.inside(index, array.shape, frame)
        self.home.touched_private(frame, READ, array, index)
        return array.load(index, frame)

    # -- store --------------------------------------------------------------------------------------------------------

    def store(self, frame: Frame, value: Any) -> None:
        """Assign on the active elements; the last of equal indices wins."""
        array = self.home.array(frame)
        value = convert(value, self.home.dtype)
        if self.home.private:
            index = tuple(i(frame) for i in self.indices)
            self.inside(index, array.shape, frame)
            self.home.touched_private(frame, WRITE, array, index)
            array.store(index, value, frame)
            return
        self.home.written(frame)
        if self.slices is not None and frame.mask is None and len(frame.space) == self.slices.rank:
            view = self.slices.view(array, frame, write=True)
            if view is not None:
                self.home.touched(frame, WRITE, view)
                view[...] = value
                return
        index = tuple(i(frame) for i in self.indices)
        if not is_vector(value) and not any(is_vector(i) for i in index):
            self._store_one(array, index, value, frame)
        else:
            self._scatter(array, index, value, frame)

    def _store_one(self, array: np.ndarray, index: tuple, value: Any, frame: Frame) -> None:
        if frame.mask is not None and not frame.mask.any():
            return
        if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
            self.home.touched(frame, WRITE, array, index)
            array[index] = value
        else:
            self._missed_one(index, array.shape, frame)

    def _scatter(self, array: np.ndarray, index: tuple, value: Any, frame: Frame) -> None:
        take = spread(True if frame.mask is None else frame.mask, frame) & self.inside(index, array.shape, frame)
        where = tuple(spread(i, frame)[take] for i in index)
        self.home.touched(frame, WRITE, array, where)
        values = spread(value, frame)[take]
        array[where] = values
        self.home.stored(frame, array, where, values)

    def touched(self, frame: Frame, kind: str, array: np.ndarray, index: tuple, inside: Any = True) -> None:
        """Report an access to the elements at `index` that are active and `inside` to the observers."""
        if self.home.watched_by(frame):
            take = spread(True if frame.mask is None else frame.mask, frame) & inside
            self.home.touched(frame, kind, array, tuple(spread(i, frame)[take] for i in index))

    def inside(self, index: tuple, shape: Sequence[int], frame: Frame) -> np.ndarray | bool:
        """Mask of the elements whose index lies inside the buffer. Raises OutOfBoundsError: an active element is out of
        bounds, and the buffer is not guarded."""
        inside = _inside(index, shape)
        if inside is not True:
            inside = np.broadcast_to(inside, frame.space)
            self._check_guarded(inside, index, shape, frame)
        return inside

    def need(self, array: np.ndarray | PrivateBuffer) -> None:
        """The values of the elements are needed: an error in runs without data."""

    # -- bounds -------------------------------------------------------------------------------------------------------

    def _check_guarded(self, inside: np.ndarray, index: tuple, shape: Sequence[int], frame: Frame) -> None:
        active = np.broadcast_to(True if frame.mask is None else frame.mask, frame.space)
        bad = ~inside & active
        if not bad.any():
            return
        if not self.home.guarded or self._is_unguarded(shape):
            first = tuple(np.argwhere(bad)[0])
            raise self._outside(frame, [int(spread(i, frame)[first]) for i in index], shape)
        if not (inside & active).any():
            frame.run.missed[self.home.name, self.home.where] += 1
        if any((spread(i, frame) < 0)[bad].any() for i in index):
            frame.run.negative[self.home.name, self.home.where] += 1

    def _missed_one(self, index: tuple, shape: Sequence[int], frame: Frame) -> None:
        if not self.home.guarded or self._is_unguarded(shape):
            raise self._outside(frame, index, shape)
        frame.run.missed[self.home.name, self.home.where] += 1
        if min(index) < 0:
            frame.run.negative[self.home.name, self.home.where] += 1

    def _is_unguarded(self, shape: Sequence[int]) -> bool:
        return any(not 0 <= number < shape[axis] for axis, number in self.unguarded)

    def _outside(self, frame: Frame, index: Sequence[Any], shape: Sequence[int]) -> OutOfBoundsError:
        return self.home.out_of_bounds(frame, index, shape, _A_NUMBER if self.home.guarded else None)


class ElementWithoutData(Element):
    """`Element` in a run without data: tiles and tensors have shapes and no values."""

    def load(self, frame: Frame) -> Any:
        self.need(self.home.array(frame))
        return super().load(frame)

    def at(self, array: np.ndarray | PrivateBuffer, index: tuple, frame: Frame) -> Any:
        self.need(array)
        return super().at(array, index, frame)

    def need(self, array: np.ndarray | PrivateBuffer) -> None:
        if isinstance(array, PrivateBuffer):
            known = array.known
        else:
            known = array.flags.writeable or isinstance(array, Assumed)
        if not known:
            name = repr(self.home.name)
            raise NoDataError(
                f"what happens next depends on the values of {name}, and this run has none",
                hint=f"assume values: assume={{{name}: values}}; or emulate with tensors: leave data=False out",
                where=self.home.where,
            )


class ElementInLockstep(Element):
    """`Element` of many programs in lockstep, which run one by one where one of them is out of bounds."""

    def _is_unguarded(self, shape: Sequence[int]) -> bool:
        return True

    def _outside(self, frame: Frame, index: Sequence[Any], shape: Sequence[int]) -> OutOfBoundsError:
        raise Outside


def element(compiler: Compiler, buffer: ir.Buffer, indices: Sequence[Any]) -> Element:
    if compiler.in_lockstep:
        return ElementInLockstep(compiler, buffer, indices)
    return (Element if compiler.data else ElementWithoutData)(compiler, buffer, indices)


def python_int(value: Any) -> Any:
    """Integer and bool scalars as Python's, which are faster to compute with; anything else as it is."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "iub" else value


def _active_part(view: np.ndarray, frame: Frame) -> Any:
    """The part of a view over the space that belongs to its active elements."""
    if frame.mask is None:
        return ()
    mask = np.broadcast_to(frame.mask, frame.space)
    alike = tuple(axis for axis, n in enumerate(view.shape) if n != mask.shape[axis])
    return np.broadcast_to(mask.any(axis=alike, keepdims=True), view.shape)


def _inside(index: tuple, shape: Sequence[int]) -> Any:
    """True if every index is inside, else a mask."""
    if all(_all_inside(i, n) for i, n in zip(index, shape, strict=True)):
        return True
    result: Any = True
    for i, n in zip(index, shape, strict=True):
        result = result & (np.asarray(i) >= 0) & (np.asarray(i) < n)
    return np.asarray(result)


def _all_inside(index: Any, extent: int) -> bool:
    if is_vector(index):
        return index.size == 0 or bool(index.min() >= 0 and index.max() < extent)
    return 0 <= index < extent
