# SPDX-License-Identifier: MIT
"""One program of a grid is run and recorded; programs with equal steps reuse its record.

Properties that depend on a tile's address are evaluated for each program: the part inside its tensor, and cache hits. A
tensor-owning unit in the same state as another one before a grid reuses the record of the whole grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.grid import Grid
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.backends.emulator.record.equivalence import Equivalence
from tilescale.timing.record import CacheLookup
from tilescale.timing.steps import RecordedTask as Recorded

Index = tuple[int, ...]


@dataclass
class _Whole:
    """A recorded grid: its programs, the cache's content after it, collectives inside programs."""

    tasks: list[Recorded] = field(default_factory=list)
    cache: Any = None
    collectives: Counter[str] = field(default_factory=Counter)
    over: bool = False


class Memoization:
    """All grids of one phase."""

    def __init__(self, equivalence: Equivalence):
        self.equivalence = equivalence
        self._known: dict[Hashable, _Whole] = {}

    def run(self, grid: Grid) -> None:
        """Record a grid."""
        run = grid.device.run
        key = self._key(grid)
        known = self._known.get(key)
        if known is not None:
            run.scheduler.block(Wait(lambda: known.over, "a unit that does the same", quiet=True))
            run.recorder.takes_over(known.tasks, known.cache)
            run.programs_ended(grid.device.unit, grid.count, known.collectives)
            return
        mine = _Whole()
        if key is not None:
            self._known[key] = mine
        mine.collectives = _Programs(self.equivalence, grid).run()
        mine.tasks, mine.cache, mine.over = run.recorder.launched.tasks, run.recorder.cache_of_now(), True

    def _key(self, grid: Grid) -> Hashable:
        """The key of this grid among those of the phase; None where there is none."""
        device = grid.device
        found = [device.slots[slot] for slot in self.equivalence.around]
        values = tuple((v.shape, str(v.dtype)) if isinstance(v, np.ndarray) else v for v in found)
        if not all(v is None or isinstance(v, tuple | int | float | np.generic) for v in values):
            return None
        rank = device.run.number(device.unit) if self.equivalence.by_rank else None
        cache = device.run.recorder.cache_of_now()
        return grid.shape, values, rank, cache.history if cache is not None else None


@dataclass
class _Steps:
    """Steps shared by several programs: the program that was run, the collectives inside it, and the number of other
    programs.
    """

    task: Recorded
    collectives: Counter[str]
    times: int = 0


class _Programs:
    def __init__(self, equivalence: Equivalence, grid: Grid):
        self.equivalence, self.grid = equivalence, grid
        self.run_, self.unit = grid.device.run, grid.device.unit
        # Deciding indices -> the tile accesses to check; these with their results -> steps.
        self._looks: dict[Index, list[CacheLookup]] = {}
        self._steps: dict[Hashable, _Steps] = {}

    def run(self) -> Counter[str]:
        """Record all of them, in start order and at their points in the cache's history."""
        grid, recorder = self.grid, self.run_.recorder
        before = Counter(self._collectives)
        recorder.starts(min(grid.plan.resident, grid.count))
        for number, (index,) in enumerate(grid.clusters):
            self._one(number, index)
            if number + grid.plan.resident < grid.count:
                recorder.starts(1)
        for steps in self._steps.values():
            each = Counter({name: count * steps.times for name, count in steps.collectives.items()})
            self.run_.programs_ended(self.unit, steps.times, each)
        return Counter(self._collectives) - before

    @property
    def _collectives(self) -> dict[str, int]:
        return self.run_.activity[self.run_.number(self.unit)].collectives

    def _one(self, number: int, index: Index) -> None:
        kind = tuple(index[axis] for axis in self.equivalence.deciding)
        looks = self._looks.get(kind)
        found = None if looks is None else tuple([self._look(look, index) for look in looks])
        known = self._steps.get((kind, found))
        if known is not None:
            known.times += 1
            self.run_.recorder.repeats(self.grid.label(index), known.task)
            return
        before = Counter(self._collectives)
        log = self._really(number, index, found)
        self._looks.setdefault(kind, log.looks)
        found = tuple(look.found for look in log.looks)
        self._steps[kind, found] = _Steps(log.task, Counter(self._collectives) - before)

    def _look(self, look: CacheLookup, index: Index) -> tuple[bool, int]:
        """The cache and bounds results of another program for the accesses of a recorded one."""
        frame = look.frame
        for slot, value in zip(self.grid.plan.slots, index, strict=True):
            frame.slots[slot] = value
        for slot, value in self.equivalence.bindings:
            if frame.slots[slot] is not None:
                frame.slots[slot] = value(frame)
        tile, nbytes = look.tile(frame)
        return self.run_.recorder.in_cache(tile, nbytes * look.times), nbytes

    def _really(self, number: int, index: Index, found: tuple[tuple[bool, int], ...] | None) -> Any:
        """Run a program to its end; `found` are the cache's answers so far. Returns its log."""
        ended: list[Task] = []
        task = self.grid.start(number, [index], lambda: ended.append(task))[0]
        log = self.run_.recorder.log_of(task)
        log.looks, log.answers = [], iter([held for held, _ in found]) if found is not None else None
        self.run_.scheduler.block(Wait(lambda: bool(ended), "its program", quiet=True))
        return log
