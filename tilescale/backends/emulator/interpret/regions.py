# SPDX-License-Identifier: MIT
"""Accesses to rectangular regions of buffers, the arguments of tile operations. access.py has the rules of clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.memory import meta_array
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.numerics import convert
from tilescale.errors import UnsupportedError


class Block:
    """A resolved region: begins and extents on an array, and whether all of it lies within."""

    __slots__ = ("array", "begins", "extents", "within")

    def __init__(self, array: Any, begins: tuple[int, ...], extents: tuple[int, ...]):
        self.array, self.begins, self.extents = array, begins, extents
        self.within = True
        for b, e, n in zip(begins, extents, array.shape, strict=True):
            if b < 0 or b + e > n:
                self.within = False

    def view(self) -> Any:
        """The part inside the buffer, as a view."""
        ranges = zip(self.begins, self.extents, strict=True)
        if self.within:
            return self.array[tuple([slice(b, b + e) for b, e in ranges])]
        return self.array[tuple([slice(max(b, 0), max(b + e, 0)) for b, e in ranges])]

    @property
    def outside(self) -> bool:
        """Whether the whole block is out of bounds."""
        return not self.within and not self.view().size

    @property
    def nbytes(self) -> int:
        """Bytes of the part inside the buffer."""
        elements = math.prod(self.extents) if self.within else self.view().size
        return elements * self.array.itemsize

    def clip(self) -> tuple[slice, ...]:
        """The in-bounds part of a tile of this region's extents."""
        return tuple(
            slice(max(-b, 0), max(min(e, n - b), 0))
            for b, e, n in zip(self.begins, self.extents, self.array.shape, strict=True)
        )


def _constants(numbers: Sequence[Any]) -> tuple[int, ...] | None:
    known = ir.constants(numbers)
    return None if known is None else tuple(known)


class Region:
    """A rectangular part of a buffer, the argument of a tile operation."""

    def __init__(self, compiler: Compiler, region: ir.Call | ir.BufferLoad):
        buffer, begins, extents = ir.region_parts(region)
        self.home = Home(compiler, buffer, of_tile=True)
        begins, extents = [*begins, *(0 for _ in self.home.lanes)], [*extents, *self.home.lanes]
        self.begins = [compiler.expr(b) for b in begins]
        self._begins = _constants(begins)
        self.extents = [compiler.expr(e) for e in extents]
        self._fixed = _constants(extents)

    def block(self, frame: Frame, array: np.ndarray | None = None) -> Block:
        """Begins and extents on the frame's instance of the buffer, or on `array`, another unit's. Raises
        OutOfBoundsError: outside a tile in shared memory or registers."""
        array = self.home.array(frame) if array is None else self.home.seen(frame, array)
        begins = self._begins or tuple([uniform(b(frame), frame, "where a tile begins") for b in self.begins])
        extents = self._fixed or tuple([uniform(e(frame), frame, "a tile's extent") for e in self.extents])
        block = Block(array, begins, extents)
        if not self.home.guarded and not block.within:
            raise self.home.out_of_bounds(
                frame, [f"{b}:{b + e}" for b, e in zip(begins, extents, strict=True)], array.shape
            )
        return block

    def read(self, frame: Frame, array: np.ndarray | None = None) -> np.ndarray:
        """The region's elements of the frame's instance or of `array`, as `load`."""
        return self._agreed(frame) if self.home.private else self.load(frame, self.block(frame, array))

    def _agreed(self, frame: Frame) -> np.ndarray:
        """The elements of a thread-private buffer, if all threads that run hold the same. Raises UsageError: the
        threads' values differ."""
        buffer, block = self.home.array(frame), self.block(frame)
        tile = np.empty(block.extents, self.home.dtype)
        for element, index in self._touched_private(frame, block, READ):
            tile[element] = uniform(buffer.load(index, frame), frame, f"{self.home.name!r} as a whole tile")
        return tile

    def _touched_private(self, frame: Frame, block: Block, kind: str) -> Iterator[tuple[tuple, tuple]]:
        """Elements of a block of a thread-private buffer, as indices of the block and of the buffer. Reports the access
        to the observers."""
        buffer = self.home.array(frame)
        for element in np.ndindex(block.extents):
            index = tuple(b + i for b, i in zip(block.begins, element, strict=True))
            self.home.touched_private(frame, kind, buffer, index)
            yield element, index

    def load(self, frame: Frame, block: Block) -> np.ndarray:
        """A block's elements; a view where all of it is in bounds, else a copy with the safe value outside."""
        view = block.view()
        self.home.touched(frame, READ, view)
        if block.within:
            return np.asarray(view)
        self._missed(frame, block)
        tile = np.full(block.extents, self.home.safe, self.home.dtype)
        tile[block.clip()] = view
        return tile

    def blank(self, frame: Frame) -> np.ndarray:
        """An uninitialized array of the region's extents and type."""
        return meta_array(self.block(frame).extents, self.home.dtype)

    def write(self, frame: Frame, value: np.ndarray, array: np.ndarray | None = None, unit: Unit | None = None) -> None:
        """Assign `value`, of the region's extents, to the frame's instance or to `array` of `unit`; clipped."""
        if self.home.private:
            self._store_private(frame, value)
        else:
            self.store(frame, self.block(frame, array), value, unit)

    def _store_private(self, frame: Frame, value: np.ndarray) -> None:
        """`store` to each active thread's instance of a thread-private buffer."""
        buffer, block = self.home.array(frame), self.block(frame)
        for element, index in self._touched_private(frame, block, WRITE):
            buffer.store(index, convert(value[element], self.home.dtype), frame)

    def store(self, frame: Frame, block: Block, value: np.ndarray, unit: Unit | None = None) -> None:
        """`write` to a block, of `unit` (default: the frame's)."""
        self.home.written(frame, unit)
        target = block.view()
        self.home.touched(frame, WRITE, target)
        self._missed(frame, block)
        value = convert(value, target.dtype)
        target[...] = value if block.within else value[block.clip()]

    def _missed(self, frame: Frame, block: Block) -> None:
        """Record an access that is partly out of bounds: allowed, but seldom intended."""
        if block.within:
            return
        place, run = (self.home.name, self.home.where), frame.run
        (run.missed if block.outside else run.clipped)[place] += frame.programs
        if min(block.begins) < 0:
            run.negative[place] += frame.programs

    @contextmanager
    def target(self, frame: Frame, reads: bool = False) -> Iterator[np.ndarray]:
        """The region as an array to update in place; `reads` says whether the result depends on the old values.

        Raises:
            OutOfBoundsError: it is partly out of bounds.
            UnsupportedError: it is in a thread-private buffer that differs between threads.
        """
        if self.home.private:
            yield self._target_private(frame, reads)
            return
        block = self.block(frame)
        if not block.within:
            raise self.home.out_of_bounds(frame, block.begins, block.array.shape)
        view = block.view()
        self.home.written(frame)
        if reads:
            self.home.touched(frame, READ, view)
        self.home.touched(frame, WRITE, view)
        held = np.asarray(view)
        yield held
        if held is not view:
            view[...] = held

    def _target_private(self, frame: Frame, reads: bool) -> np.ndarray:
        """`target` for a thread-private buffer, while all threads hold the same."""
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
