# SPDX-License-Identifier: MIT
"""Runs of grids in lockstep: one frame stands for many programs, see interpret/lockstep.py.

Programs that turn out to be unusual, in an access out of bounds or an error, run again one by one, which is harmless
because they write only what none of them reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.grid import Grid
from tilescale.errors import TileScaleError


class Outside(BaseException):
    """An access out of bounds by programs in lockstep."""


@dataclass(frozen=True)
class LockstepGrids:
    """All grids of one phase.

    Attributes:
        run_all: the closure of the phase, of many programs.
        axis: the axis of the grid along which consecutive programs run in lockstep.
        most: maximum number of programs in lockstep.
        first, count: slots of the index of the first of them, and of their number.
        slots: slots of the indices of a program.
        tensors: slots of the parameters, and whether programs write them.
        allocate: binds tiles in a frame.
    """

    run_all: Callable[[Frame], Any]
    axis: int
    most: int
    first: int
    count: int
    slots: Sequence[int]
    tensors: Sequence[tuple[int, bool]]
    allocate: Callable[[Frame], None]

    def run(self, grid: Grid) -> None:
        run = grid.device.run
        found = run.missed, run.clipped, run.negative
        before = [counts.copy() for counts in found]
        done = 0
        try:
            if not self._share_memory(grid.device):
                for corner in np.ndindex(*(1 if a == self.axis else n for a, n in enumerate(grid.shape))):
                    for first in range(0, grid.shape[self.axis], self.most):
                        done += self._some(grid, corner, first)
                return
        except TileScaleError:
            for counts, old in zip(found, before, strict=True):
                counts.clear()
                counts.update(old)
            run.programs_ended(grid.device.unit, -done, {})
        grid.run_programs(list(enumerate(grid.clusters)))

    def _some(self, grid: Grid, corner: tuple[int, ...], first: int) -> int:
        """Run the programs from an index on; returns their number."""
        count = min(self.most, grid.shape[self.axis] - first)
        indices = [(*corner[: self.axis], i, *corner[self.axis + 1 :]) for i in range(first, first + count)]
        try:
            self._in_lockstep(grid, indices[0], count)
            grid.device.run.programs_ended(grid.device.unit, count, {})
        except Outside:
            numbers = (sum(i * math.prod(grid.shape[:axis]) for axis, i in enumerate(index)) for index in indices)
            grid.run_programs([(number, [index]) for number, index in zip(numbers, indices, strict=True)])
        return count

    def _in_lockstep(self, grid: Grid, index: tuple[int, ...], count: int) -> None:
        device = grid.device
        frame = Frame(device.run, device.unit, device.slots.copy(), grid.plan.launch.thread_count)
        frame.programs = count
        for slot, value in zip((*self.slots, self.first, self.count), (*index, index[self.axis], count), strict=True):
            frame.slots[slot] = value
        self.allocate(frame)
        self.run_all(frame)

    def _share_memory(self, device: Frame) -> bool:
        """Whether a tensor that is written overlaps another one: two arguments may be parts of one tensor."""
        pairs = combinations([(device.slots[slot], written) for slot, written in self.tensors], 2)
        return any((one or other) and np.may_share_memory(a, b) for (a, one), (b, other) in pairs)
