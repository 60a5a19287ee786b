# SPDX-License-Identifier: MIT
"""All races and signals of a faulty run, where a check ends the run at the first race.

Waits in a deadlock may be released, so that the run shows which accesses they would order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.backends.emulator.checks.clocks import Clock, Past
from tilescale.backends.emulator.checks.explain import Mark, Race
from tilescale.backends.emulator.checks.races import Races
from tilescale.backends.emulator.checks.states import Access
from tilescale.backends.emulator.checks.text import owner_of
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import Location

_MOST = 2000
"""Maximum number of races that are kept: a loop finds the same ones again and again."""


@dataclass(frozen=True)
class Sent:
    """A signal: the flag, its tensor-owning unit's number, the sender with its knowledge, and the value."""

    home: Home
    index: tuple[int, ...]
    holder: int
    unit: Unit
    past: Past
    value: int


@dataclass(frozen=True)
class Released:
    """A released wait: the flag, the unit, and the task's clock."""

    home: Home
    index: tuple[int, ...]
    unit: Unit
    clock: Clock


class Witness(Races):
    """Collects races and signals without ending the run.

    Args:
        stuck: waits in this line are released in a deadlock; None for none.
    """

    def __init__(self, stuck: Location | None = None):
        self._stuck = stuck
        self.races: list[Race] = []
        self.sent: list[Sent] = []
        self.released: list[Released] = []

    def starts(self, run: Run) -> None:
        super().starts(run)
        run.scheduler.release = self._release

    def _record(self, cells: np.ndarray, index: Any, access: Access) -> None:
        states = [self._table[int(number)] for number in np.unique(cells[index])]
        races = [Race(other, access, state) for state in states if (other := state.conflict(access)) is not None]
        if not races:
            super()._record(cells, index, access)
        elif len(self.races) < _MOST:
            self.races += races

    def signals(self, frame: Frame, home: Home, flag: np.ndarray, op: str, before: int) -> None:
        past = self._clock.past
        super().signals(frame, home, flag, op, before)
        holder = owner_of(frame.unit, home.root, flag) or self._owner(home.root, flag)
        if holder is not None:
            index = tuple(Mark(home, flag, 0).index)
            self.sent.append(Sent(home, index, self.number(holder), frame.unit, past, flag.item()))

    def _owner(self, root: int, flag: np.ndarray) -> Unit | None:
        return next((unit for unit in self._run.units if owner_of(unit, root, flag) is unit), None)

    def number(self, unit: Unit) -> int:
        return self._run.number(unit)

    def _release(self, waiting: Mapping[Task, Wait]) -> list[Task]:
        found = []
        for task, wait in waiting.items():
            if wait.flag is not None and wait.where == self._stuck:
                self.released.append(Released(*wait.flag, self._clocks[task]))
                found.append(task)
        return found
