# SPDX-License-Identifier: MIT
"""What a run with mistakes does: all races and signals of it, where a check ends it at the first race.

Waits in which it is deadlocked may be let go, so that it shows which accesses they would order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilescale.backends.emulator.checks.clocks import Clock, Past
from tilescale.backends.emulator.checks.explain import Mark, Race
from tilescale.backends.emulator.checks.races import Races
from tilescale.backends.emulator.checks.states import Access
from tilescale.backends.emulator.checks.text import owner_of
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location

if TYPE_CHECKING:
    from tilescale.backends.emulator.execute.frame import Frame
    from tilescale.backends.emulator.interpret.buffers import Home
    from tilescale.backends.emulator.run import Run

_MOST = 2000
"""Races that are kept: a loop finds the same again and again."""


@dataclass(frozen=True)
class Sent:
    """A signal: the flag, whose it is by the number of its tensor-owning unit, who sent it and knew what, its value."""

    home: Home
    index: tuple[int, ...]
    holder: int
    unit: Unit
    past: Past
    value: int


@dataclass(frozen=True)
class Released:
    """A wait that was let go: the flag, the unit, and the task's clock."""

    home: Home
    index: tuple[int, ...]
    unit: Unit
    clock: Clock


class Witness(Races):
    """Notes races and signals, and lets the run go on.

    Args:
        stuck: waits in this line are let go in a deadlock; None for none.
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
        """The number of the tensor-owning unit that a unit is or lies in."""
        return self._run.number(unit)

    def _release(self, waiting: Sequence[Task]) -> list[Task]:
        found = [task for task in waiting if task.wait.flag is not None and task.wait.where == self._stuck]
        for task in found:
            self.released.append(Released(*task.wait.flag, self._clocks[task]))
        return found
