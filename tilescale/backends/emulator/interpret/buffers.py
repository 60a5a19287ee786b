# SPDX-License-Identifier: MIT
"""Resolution of a buffer in a frame, and the report of accesses to observers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.memory import Assumed, PrivateBuffer, meta_array
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.addresses import placed
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.packed import Packed, seen_as
from tilescale.backends.emulator.interpret.selections import located
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.numerics import element_type, lane_axis, numpy_dtype
from tilescale.errors import OutOfBoundsError, UnsupportedError
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
        same = home is None or _form(*home) == _form(buffer.shape, str(buffer.dtype), buffer.strides)
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


def _form(shape: Sequence[Any], dtype: str, strides: Sequence[Any]) -> tuple[list[str], str, list[str]]:
    return [str(n) for n in shape], dtype, [str(n) for n in strides]
