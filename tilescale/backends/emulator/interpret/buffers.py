# SPDX-License-Identifier: MIT
"""Resolution of a buffer in a frame, and the report of accesses to observers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.memory import Assumed, PrivateBuffer, meta_array
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.addresses import placed
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.selections import located
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.numerics import element_type, is_half_byte, lane_axis, numpy_dtype
from tilescale.errors import OutOfBoundsError, ShapeError, UnsupportedError
from tilescale.program.model import declaration

_NOT_CUT_OFF = (
    "copies are cut off at the end of a tensor, this is not: declare as many elements as there are units that use one, "
    "or put the statement under a condition"
)
_ON_CHIP = "only accesses to device memory are cut off: slice the tile, or put the statement under a condition"


class Home:
    """Resolution of a buffer in a frame, for any shape or type of its view.

    Attributes:
        of_tile: whether a tile operation accesses it, not elements one by one.
        step: the statement that accesses it; the outermost one of the parallel loops around that.
        apart: whether a condition that differs between threads is around the step.
    """

    def __init__(self, compiler: Compiler, buffer: ir.Buffer, of_tile: bool = False):
        self.buffer, self.of_tile = buffer, of_tile
        self.step, self.apart = compiler.step, bool(compiler.threads_apart)
        self.slot = compiler.slot(buffer.data)
        self.root = compiler.root(self.slot)
        self.name = buffer.name
        self.private = buffer.scope() in PRIVATE
        self.guarded = buffer.scope() == "global"
        self.lanes = lane_axis(str(buffer.dtype))
        self.dtype = numpy_dtype(element_type(str(buffer.dtype)))
        self.safe = compiler.safe_value(buffer, of_tile)
        self.shared = not self.private and not buffer.scope().startswith("local")
        home = compiler.home(buffer)
        same = home is None or _is_alike(home, (buffer.shape, str(buffer.dtype), buffer.strides))
        self._declared = (compiler.buffer_named(buffer.data) or buffer).name
        self._addressed = self.slot in compiler.addressed
        self._shape = None if same and not self._addressed else [compiler.expr(n) for n in (*buffer.shape, *self.lanes)]
        self._strides = [compiler.expr(n * math.prod(self.lanes)) for n in buffer.strides]
        self.replicated = compiler.replicated_root(buffer)
        self.where = compiler.where

    def array(self, frame: Frame) -> Any:
        """The instance that the frame's unit sees: an array, or PrivateBuffer for a thread-private buffer."""
        array = frame.slots[self.slot]
        if array is None:
            raise UnsupportedError(
                f"{self.name!r}: a buffer of scope {self.buffer.scope()!r} made where no program's threads run as one",
                hint="allocate it in the scale of the program, or in device memory with T.alloc(..., level=)",
            )
        return self.seen(frame, array)

    def seen(self, frame: Frame, array: Any) -> Any:
        """An instance in the buffer's shape and type, which differ from its memory's if it is a view."""
        if self._shape is None:
            return array
        shape = tuple(uniform(n(frame), frame, "a shape") for n in self._shape)
        strides = self._strides_of(shape, frame)
        if self._addressed:
            return placed(array, self.name, shape, strides, self.dtype)
        if isinstance(array, np.ndarray) and not array.flags.writeable and not isinstance(array, Assumed):
            return meta_array(shape, self.dtype)
        if isinstance(array, PrivateBuffer):
            raise UnsupportedError(f"a view of another shape of the thread-private buffer {self.name!r}")
        flat = array.reshape(-1)
        if not np.shares_memory(flat, array):
            raise UnsupportedError(f"a view of another shape of {self.name!r}, whose elements are not contiguous here")
        return seen_as(flat, self._declared, shape, strides, self.dtype)

    def _strides_of(self, shape: tuple[int, ...], frame: Frame) -> list[int]:
        """The strides that the buffer declares, in elements; contiguous by default."""
        if self._strides:
            return [*(uniform(n(frame), frame, "a stride") for n in self._strides), *(1 for _ in self.lanes)]
        return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def touched(self, frame: Frame, kind: str, array: Any, index: Any = ()) -> None:
        """Report an access to `array[index]` to the observers; of single elements, the active ones."""
        watching = self.watched_by(frame)
        if watching:
            array, index = self.located(array, index)
        for observer in watching:
            observer.accesses(frame, self, kind, array, index)

    def stored(self, frame: Frame, array: Any, index: tuple, values: np.ndarray) -> None:
        """Report values that were stored to `array[index]`, in no order, to the observers."""
        for observer in self.watched_by(frame):
            observer.stored(frame, self, array, index, values)

    @staticmethod
    def located(array: Any, index: Any) -> tuple[np.ndarray, Any]:
        """The array that holds the elements of an array or a view, and their index in it."""
        return array.memory(index) if isinstance(array, Packed) else located(array, index)

    def touched_private(self, frame: Frame, kind: str, buffer: PrivateBuffer, index: tuple) -> None:
        """Report an access by the active threads to their elements of a thread-private buffer to the observers."""
        for observer in self.watched_by(frame):
            observer.accesses_private(frame, self, kind, buffer, index)

    def watched_by(self, frame: Frame) -> Sequence[Observer]:
        """The observers of the frame's run that watch these accesses."""
        run = frame.run
        if not run.observers:
            return ()
        found = run.watching.get(self)
        if found is None:
            found = run.watching[self] = [o for o in run.observers if o.looks_at(self)]
        return found

    def written(self, frame: Frame, unit: Unit | None = None) -> None:
        """Record a write to the instance of `unit` (default: the frame's), for spinning readers and for replicas."""
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


_Form: TypeAlias = tuple[Sequence[Any], str, Sequence[Any]]
"""Shape, type and strides of a buffer."""


def _is_alike(one: _Form, other: _Form) -> bool:
    (shape, dtype, strides), (others, its_dtype, its_strides) = one, other
    return dtype == its_dtype and _are_equal(shape, others) and _are_equal(strides, its_strides)


def _are_equal(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(_is_equal, ones, others))


def _is_equal(one: Any, other: Any) -> bool:
    return (isinstance(one, ir.Var) and one.same_as(other)) or _extent(one) == _extent(other)


def _extent(number: Any) -> int | str:
    """A number, or the text of a symbolic one; to print takes long."""
    if isinstance(number, ir.IntImm):
        return int(number.value)
    return number if isinstance(number, int) else str(number)


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
    """The content of memory from its begin, viewed as elements of another type and shape. Raises ShapeError: the memory
    ends before the view does.

    Args:
        flat: all elements in the memory, one-dimensional and contiguous.
        strides: in elements of the view.
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
