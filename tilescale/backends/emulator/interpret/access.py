# SPDX-License-Identifier: MIT
"""Accesses to buffers: single elements (for all elements of the space at once) and rectangular regions.

As stock TileLang compiles them, accesses to global memory are guarded: a load outside the tensor yields the safe value
(0), a store is dropped, and the report tells of accesses that missed altogether. It does not guard an index that is a
number: those, and accesses outside a tile in shared memory or registers, are errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector, spread, uniform
from tilescale.backends.emulator.execute.memory import PrivateBuffer, meta_array
from tilescale.backends.emulator.execute.observe import READ, WRITE, Observer
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.slices import slices
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.numerics import convert, element_type, numpy_dtype
from tilescale.errors import NoDataError, OutOfBoundsError, UnsupportedError
from tilescale.program.model import declaration

_NOT_CUT_OFF = (
    "copies are cut off at the end of a tensor, this is not: declare as many elements as there are units that use one, "
    "or put the statement under a condition"
)
_A_NUMBER = "TileLang does not guard an index that is a number; a negative one counts from the end"
_ON_CHIP = "only accesses to device memory are cut off: slice the tile, or put the statement under a condition"


class Home:
    """How a buffer is found in a frame, whatever shape or type it is viewed with."""

    def __init__(self, compiler: Compiler, buffer: ir.Buffer):
        self.buffer = buffer
        self.slot = compiler.slot(buffer.data)
        self.root = compiler.root(self.slot)
        self.name = buffer.name
        self.private = buffer.scope() in PRIVATE
        self.guarded = buffer.scope() == "global"
        self.dtype = numpy_dtype(element_type(str(buffer.dtype)))
        self.safe = compiler.safe_value(buffer)
        self.shared = not self.private and not buffer.scope().startswith("local")
        home = compiler.home(buffer)
        same = home is None or ([str(n) for n in home[0]], home[1]) == (
            [str(n) for n in buffer.shape],
            str(buffer.dtype),
        )
        self._shape = None if same else [compiler.expr(n) for n in buffer.shape]
        self.replicated = compiler.replicated_root(buffer)
        self.where = compiler.where
        self._watched_by: list[Observer] | None = None

    def array(self, frame: Frame) -> Any:
        """The instance that the frame's unit sees: an array, or PrivateBuffer for a thread-private buffer."""
        array = frame.slots[self.slot]
        if array is None:
            raise UnsupportedError(
                f"{self.name!r}: a buffer of scope {self.buffer.scope()!r} made where no program's threads run as one",
                hint="allocate it in the scale of the program, or in device memory with T.alloc(..., level=)",
            )
        if self._shape is None:
            return array
        shape = tuple(uniform(n(frame), frame, "a shape") for n in self._shape)
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            return meta_array(shape, self.dtype)
        if isinstance(array, PrivateBuffer):
            raise UnsupportedError(f"a view of another shape of the thread-private buffer {self.name!r}")
        flat = array.reshape(-1)
        if not np.shares_memory(flat, array):
            raise UnsupportedError(f"a view of another shape of {self.name!r}, whose elements are not contiguous here")
        return flat.view(self.dtype).reshape(shape)

    def touched(self, frame: Frame, kind: str, array: np.ndarray, index: Any = ()) -> None:
        """Tell the observers of an access to `array[index]`; of elements that are given one by one, the active ones."""
        for observer in self.watched_by(frame):
            observer.accesses(frame, self, kind, array, index)

    def touched_private(self, frame: Frame, kind: str, buffer: PrivateBuffer, index: tuple) -> None:
        """Tell the observers of an access by the active threads to their elements of a thread-private buffer."""
        for observer in self.watched_by(frame):
            observer.accesses_private(frame, self, kind, buffer, index)

    def watched_by(self, frame: Frame) -> Sequence[Observer]:
        """The observers of the frame's run that want to be told of these accesses."""
        if not frame.run.observers:
            return ()
        if self._watched_by is None:
            self._watched_by = [o for o in frame.run.observers if o.looks_at(self)]
        return self._watched_by

    def written(self, frame: Frame, unit: Unit | None = None) -> None:
        """Note a write to the instance of `unit` (default: the frame's): for spinning readers and for replicas."""
        if self.shared:
            frame.run.scheduler.progress += 1
        if self.replicated is not None:
            versions = (unit or frame.unit).owner(self.replicated).versions
            versions[self.replicated] = versions.get(self.replicated, 0) + 1

    def out_of_bounds(
        self, frame: Frame, index: Sequence[Any], shape: Sequence[int], hint: str | None = None
    ) -> OutOfBoundsError:
        """The error for an access at `index`; the statement adds the line of the access."""
        text = ", ".join(str(i) for i in index)
        return OutOfBoundsError(
            f"{self.name}[{text}] is outside the buffer, whose shape is {tuple(shape)}: {frame.unit}",
            hint=hint or (_NOT_CUT_OFF if self.guarded else _ON_CHIP),
            where=declaration(self.buffer),
        )


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
        """The values at an index that is given by arrays."""
        if not self.home.private:
            return self._gather(array, index, frame)
        self.inside(index, array.shape, frame)
        self.home.touched_private(frame, READ, array, index)
        return array.load(index, frame)

    # -- store --------------------------------------------------------------------------------------------------------

    def store(self, frame: Frame, value: Any) -> None:
        """Assign on the active elements; where several name one element, the last wins."""
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
        array[where] = spread(value, frame)[take]

    def touched(self, frame: Frame, kind: str, array: np.ndarray, index: tuple, inside: Any = True) -> None:
        """Tell the observers of an access to the elements at `index` that are active and `inside`."""
        if self.home.watched_by(frame):
            take = spread(True if frame.mask is None else frame.mask, frame) & inside
            self.home.touched(frame, kind, array, tuple(spread(i, frame)[take] for i in index))

    def inside(self, index: tuple, shape: Sequence[int], frame: Frame) -> np.ndarray | bool:
        """Where an index lies inside the buffer.

        Raises:
            OutOfBoundsError: it does not on an active element, and the buffer is not guarded.
        """
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

    def _missed_one(self, index: tuple, shape: Sequence[int], frame: Frame) -> None:
        if not self.home.guarded or self._is_unguarded(shape):
            raise self._outside(frame, index, shape)
        frame.run.missed[self.home.name, self.home.where] += 1

    def _is_unguarded(self, shape: Sequence[int]) -> bool:
        return any(not 0 <= number < shape[axis] for axis, number in self.unguarded)

    def _outside(self, frame: Frame, index: Sequence[Any], shape: Sequence[int]) -> OutOfBoundsError:
        return self.home.out_of_bounds(frame, index, shape, _A_NUMBER if self.home.guarded else None)


class ElementWithoutData(Element):
    """The same in a run without data: tiles and tensors have shapes and no values."""

    def load(self, frame: Frame) -> Any:
        self.need(self.home.array(frame))
        return super().load(frame)

    def at(self, array: np.ndarray | PrivateBuffer, index: tuple, frame: Frame) -> Any:
        self.need(array)
        return super().at(array, index, frame)

    def need(self, array: np.ndarray | PrivateBuffer) -> None:
        known = array.known if isinstance(array, PrivateBuffer) else array.flags.writeable
        if not known:
            raise NoDataError(
                f"what happens next depends on the values of {self.home.name!r}, and this run has none",
                hint="emulate with tensors: leave data=False out",
                where=self.home.where,
            )


def element(compiler: Compiler, buffer: ir.Buffer, indices: Sequence[Any]) -> Element:
    """The access to one element."""
    return (Element if compiler.data else ElementWithoutData)(compiler, buffer, indices)


def python_int(value: Any) -> Any:
    """Integer and bool scalars as Python's, which are faster to compute with; anything else as it is."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "iub" else value


def _active_part(view: np.ndarray, frame: Frame) -> Any:
    """Which elements of a view over the space belong to an active element of it."""
    if frame.mask is None:
        return ()
    mask = np.broadcast_to(frame.mask, frame.space)
    alike = tuple(axis for axis, n in enumerate(view.shape) if n != mask.shape[axis])
    return np.broadcast_to(mask.any(axis=alike, keepdims=True), view.shape)


def _inside(index: tuple, shape: Sequence[int]) -> Any:
    """True if every index is inside, else an array that says where."""
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


class Block:
    """A resolved region: begins and extents on an array, and whether all of it lies within."""

    __slots__ = ("array", "begins", "extents", "within")

    def __init__(self, array: np.ndarray, begins: tuple[int, ...], extents: tuple[int, ...]):
        self.array, self.begins, self.extents = array, begins, extents
        self.within = True
        for b, e, n in zip(begins, extents, array.shape, strict=True):
            if b < 0 or b + e > n:
                self.within = False

    def view(self) -> np.ndarray:
        """The part that lies inside, as a view."""
        ranges = zip(self.begins, self.extents, strict=True)
        if self.within:
            return self.array[tuple([slice(b, b + e) for b, e in ranges])]
        return self.array[tuple([slice(max(b, 0), max(b + e, 0)) for b, e in ranges])]

    @property
    def outside(self) -> bool:
        """Whether nothing of it lies inside."""
        return not self.within and not self.view().size

    @property
    def nbytes(self) -> int:
        """Bytes of the part that lies inside."""
        elements = math.prod(self.extents) if self.within else self.view().size
        return elements * self.array.itemsize

    def clip(self) -> tuple[slice, ...]:
        """Which part of a tile of this region's extents lies inside."""
        return tuple(
            slice(max(-b, 0), max(min(e, n - b), 0))
            for b, e, n in zip(self.begins, self.extents, self.array.shape, strict=True)
        )


class Region:
    """A rectangular part of a buffer, the argument of a tile operation."""

    def __init__(self, compiler: Compiler, region: Any):
        buffer, begins, extents = ir.region_parts(region)
        self.home = Home(compiler, buffer)
        self.begins = [compiler.expr(b) for b in begins]
        self.extents = [compiler.expr(e) for e in extents]
        constants = [ir.constant(e) for e in extents]
        self._fixed = None if None in constants else tuple(constants)

    def block(self, frame: Frame, array: np.ndarray | None = None) -> Block:
        """Begins and extents on the frame's instance of the buffer, or on `array`, another unit's.

        Raises:
            OutOfBoundsError: outside a tile in shared memory or registers.
        """
        array = self.home.array(frame) if array is None else array
        begins = tuple([uniform(b(frame), frame, "where a tile begins") for b in self.begins])
        extents = self._fixed or tuple([uniform(e(frame), frame, "a tile's extent") for e in self.extents])
        block = Block(array, begins, extents)
        if not self.home.guarded and not block.within:
            raise self.home.out_of_bounds(
                frame, [f"{b}:{b + e}" for b, e in zip(begins, extents, strict=True)], array.shape
            )
        return block

    def read(self, frame: Frame, array: np.ndarray | None = None) -> np.ndarray:
        """The region's elements, of the frame's instance or of `array`, as `load`."""
        return self._agreed(frame) if self.home.private else self.load(frame, self.block(frame, array))

    def _agreed(self, frame: Frame) -> np.ndarray:
        """The elements of a thread-private buffer, if all threads that run hold the same.

        Raises:
            UsageError: they do not.
        """
        buffer, block = self.home.array(frame), self.block(frame)
        tile = np.empty(block.extents, self.home.dtype)
        for element, index in self._touched_private(frame, block, READ):
            tile[element] = uniform(buffer.load(index, frame), frame, f"{self.home.name!r} as a whole tile")
        return tile

    def _touched_private(self, frame: Frame, block: Block, kind: str) -> Iterator[tuple[tuple, tuple]]:
        """The elements of a block of a thread-private buffer: in the block, and in the buffer. Observers are told."""
        buffer = self.home.array(frame)
        for element in np.ndindex(block.extents):
            index = tuple(b + i for b, i in zip(block.begins, element, strict=True))
            self.home.touched_private(frame, kind, buffer, index)
            yield element, index

    def load(self, frame: Frame, block: Block) -> np.ndarray:
        """A block's elements; a view where all of it lies inside, else a copy with the safe value outside."""
        view = block.view()
        self.home.touched(frame, READ, view)
        if block.within:
            return view
        self._missed(frame, block)
        tile = np.full(block.extents, self.home.safe, self.home.dtype)
        tile[block.clip()] = view
        return tile

    def blank(self, frame: Frame) -> np.ndarray:
        """An array of the region's extents and type that says nothing of its elements."""
        return meta_array(self.block(frame).extents, self.home.dtype)

    def write(self, frame: Frame, value: np.ndarray, array: np.ndarray | None = None, unit: Unit | None = None) -> None:
        """Assign `value`, of the region's extents, to the frame's instance or to `array` of `unit`; clipped."""
        if self.home.private:
            self._store_private(frame, value)
        else:
            self.store(frame, self.block(frame, array), value, unit)

    def _store_private(self, frame: Frame, value: np.ndarray) -> None:
        """The same in each active thread's instance of a thread-private buffer."""
        buffer, block = self.home.array(frame), self.block(frame)
        for element, index in self._touched_private(frame, block, WRITE):
            buffer.store(index, convert(value[element], self.home.dtype), frame)

    def store(self, frame: Frame, block: Block, value: np.ndarray, unit: Unit | None = None) -> None:
        """The same for a block, of `unit` (default: the frame's)."""
        self.home.written(frame, unit)
        target = block.view()
        self.home.touched(frame, WRITE, target)
        self._missed(frame, block)
        value = convert(value, target.dtype)
        target[...] = value if block.within else value[block.clip()]

    def _missed(self, frame: Frame, block: Block) -> None:
        """Note an access to nothing at all: allowed, and seldom meant."""
        if block.outside:
            frame.run.missed[self.home.name, self.home.where] += 1

    def target(self, frame: Frame, reads: bool = False) -> np.ndarray:
        """The region as a view to compute on in place; `reads` says whether the result depends on what it held.

        Raises:
            OutOfBoundsError: it is not all inside.
            UnsupportedError: it is of a thread-private buffer that differs between threads.
        """
        if self.home.private:
            return self._target_private(frame, reads)
        block = self.block(frame)
        if not block.within:
            raise self.home.out_of_bounds(frame, block.begins, block.array.shape)
        view = block.view()
        self.home.written(frame)
        if reads:
            self.home.touched(frame, READ, view)
        self.home.touched(frame, WRITE, view)
        return view

    def _target_private(self, frame: Frame, reads: bool) -> np.ndarray:
        """The same of a thread-private buffer, while all threads hold the same."""
        buffer, block = self.home.array(frame), self.block(frame)
        if buffer.lead:
            raise UnsupportedError(
                f"a tile operation that computes in {self.home.name!r}, which differs between threads",
                hint="compute in a fragment: T.alloc_fragment",
            )
        for kind in (READ, WRITE) if reads else (WRITE,):
            for _ in self._touched_private(frame, block, kind):
                pass
        return Block(buffer.data, block.begins, block.extents).view()
