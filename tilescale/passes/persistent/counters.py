# SPDX-License-Identifier: MIT
"""Counters: arrivals of the tasks of a phase, for each chunk of a tensor that they touch.

A task of the phase adds one to the counter of every chunk that it has touched; a later task waits until all tasks with
elements of its chunks have. The extents of chunks change how often tasks signal and wait, never what is ordered. A
signal waits for the stores of its block, and longer while loads are in flight. So where later tasks need most of the
phase there is one counter, and a block that executes several of its tasks signals once, behind the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.passes.overlap.chunks import signal, wait
from tilescale.passes.overlap.tile_order import stairs
from tilescale.program.tile_boxes import Boxes

STEPS = 8
"""Different numbers of arrivals, along the chunks of a tensor, that a wait computes."""

LARGEST = 1 << 14
"""Chunks of a tensor, at most."""

MOST = 0.75
"""Share of a phase's tasks that later ones wait for, on average, from which on they wait for all of them."""


@dataclass(frozen=True)
class Counter:
    """Counters of a phase.

    Attributes:
        name: of what they count, for the text of the program.
        boxes: what each task of the phase touches.
        chunk: extents of a chunk.
        blocks: blocks that signal, each behind its last task of the phase; None where every task signals.
    """

    name: str
    boxes: Boxes
    chunk: tuple[int, ...]
    blocks: int | None = None

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Dimensions with several chunks; the first one where none has."""
        sizes = zip(self.boxes.shape, self.chunk, strict=True)
        return tuple(axis for axis, (extent, size) in enumerate(sizes) if size < extent) or (0,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of chunks along these."""
        return tuple(-(-self.boxes.shape[axis] // self.chunk[axis]) for axis in self.axes)

    @cached_property
    def arrivals(self) -> np.ndarray:
        """Tasks that touch each chunk."""
        return self.touched(self.boxes).sum(axis=0)

    def touched(self, boxes: Boxes) -> np.ndarray:
        """Whether a box touches a chunk: (tasks, chunks)."""
        spans = [self._span(boxes, axis) for axis in self.axes]
        places = np.unravel_index(np.arange(math.prod(self.shape)), self.shape)
        inside = [
            (low[:, None] <= place) & (place <= high[:, None]) for (low, high), place in zip(spans, places, strict=True)
        ]
        return np.logical_and.reduce(inside)

    def order(self, later: Boxes) -> np.ndarray:
        """Whether a later task waits for a task of the phase: (later tasks, tasks)."""
        return (self.touched(later).astype(np.float32) @ self.touched(self.boxes).astype(np.float32).T) > 0

    @property
    def is_simple(self) -> bool:
        """Whether there are few enough counters, with arrival counts that a wait can compute."""
        return math.prod(self.shape) <= LARGEST and int(np.count_nonzero(np.diff(self.arrivals))) < STEPS

    def signals(self, flags: ir.Buffer, *iteration: Any) -> ir.Stmt:
        """A task has arrived at its chunks; in a loop of phases, each iteration has flags of its own."""
        return self._each(self.boxes, lambda place: signal(flags, *iteration, *place))

    def waits(self, later: Boxes, flags: ir.Buffer, *iteration: Any) -> ir.Stmt:
        """A later task waits for its chunks."""
        return self._each(later, lambda place: wait(flags, *iteration, *place, value=self._expected(place)))

    def _expected(self, place: list[Any]) -> Any:
        number: Any = ir.IntImm("int32", 0)
        for index, extent in zip(place, self.shape, strict=True):
            number = number * extent + index
        counts = [int(n) for n in self.arrivals] if self.blocks is None else [self.blocks]
        return ir.simplify(stairs(number, range(len(counts)), counts), {})

    def _span(self, boxes: Boxes, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last chunk of each box along a dimension."""
        size = self.chunk[axis]
        most = (boxes.shape[axis] - 1) // size
        return np.maximum(boxes.first[axis] // size, 0), np.minimum((boxes.last[axis] - 1) // size, most)

    def _each(self, boxes: Boxes, make: Callable[[list[Any]], ir.Stmt]) -> ir.Stmt:
        """A statement for each chunk of a box."""
        place: list[Any] = []
        loops: list[tuple[ir.Var, Any, Any]] = []
        for axis in self.axes:
            first, last = self._bounds(boxes, axis)
            low, high = self._span(boxes, axis)
            if (low == high).all():
                place.append(first)
                continue
            loops.append((ir.Var("chunk", "int32"), first, ir.simplify(last - first + 1, {})))
            place.append(loops[-1][0])
        stmt = make(place)
        for var, first, count in reversed(loops):
            stmt = ir.For(var, first, count, ir.ForKind.SERIAL, stmt)
        return stmt

    def _bounds(self, boxes: Boxes, axis: int) -> tuple[Any, Any]:
        """First and last chunk of a task along a dimension, in terms of the grid's indices."""
        size, extent = self.chunk[axis], boxes.shape[axis]
        if size == extent:
            return ir.IntImm("int32", 0), ir.IntImm("int32", 0)
        first, last = (ir.int_node(expr) // size for expr in (boxes.begins[axis], boxes.ends[axis] - 1))
        if (boxes.first[axis] < 0).any():
            first = ir.Max(first, ir.IntImm("int32", 0))
        if (boxes.last[axis] > extent).any():
            last = ir.Min(last, ir.IntImm("int32", (extent - 1) // size))
        return ir.simplify(first, {}), ir.simplify(last, {})


def counters_of(name: str, earlier: Boxes, later: Boxes, blocks: int) -> Counter:
    """Counters of a phase in chunks that suit tasks of a later one. Where these need most of the phase: one counter, of
    blocks if those are fewer than tasks.
    """
    sides = zip(earlier.shape, earlier.first, earlier.last, later.first, later.last, strict=True)
    found = Counter(name, earlier, tuple(_extent(*side) for side in sides))
    order = found.order(later)
    if order.mean() <= MOST or not found.touched(earlier).any(axis=1).all():
        return found
    return replace(found, chunk=tuple(earlier.shape), blocks=blocks if blocks < order.shape[1] else None)


def _extent(extent: int, *bounds: np.ndarray) -> int:
    """Extent of chunks along a dimension: such that a later task waits for one or two, without much that it needs not.

    That of the larger tiles where both are aligned, else as many of the aligned ones as a later task touches.
    """
    first, end, later, later_end = bounds
    (mine, is_even), (other, is_other_even) = _tiles(first, end), _tiles(later, later_end)
    if is_even and is_other_even and max(mine, other) % min(mine, other) == 0:
        size = max(mine, other)
    elif is_other_even:
        size = other
    elif is_even:
        size = mine * -(-other // mine)
    else:
        size = extent
    return min(size, extent)


def _tiles(first: np.ndarray, end: np.ndarray) -> tuple[int, bool]:
    """The extent of tiles, and whether they begin at its multiples."""
    size = max(int((end - first).max(initial=1)), 1)
    return size, not (first % size).any()
