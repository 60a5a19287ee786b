# SPDX-License-Identifier: MIT
"""Other interleavings of the same program, one for each seed.

Random priorities with change points, as in Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of
Finding Bugs" (PCT), ASPLOS 2010: the ready task of highest priority runs. Now and then, between two statements, the
running task gets the lowest priority, more often when it has just signalled. Seed 0 is adversarial: the task that
became ready last runs first, the last programs of a grid start first, and a task that signals yields to those that wait
for the signal. Grids that depend on the start order of programs keep this order in all interleavings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.execute.scheduler import Scheduler
from tilescale.backends.emulator.execute.tasks import Task

Item = TypeVar("Item")

_RATES = (0.05, 0.2, 0.5)
"""Probabilities of a change of priority after a statement; a seed selects one."""

_RATE_OF_SIGNALS = 0.5
"""Probability after a signal and at a wait: bugs often show there."""

_LOOKS = 0.25
"""Probability that waits are checked again although others can run."""


class Interleaved(Scheduler):
    """Runs tasks in an order that a seed determines."""

    def __init__(self, observers: Sequence[Observer], seed: int):
        super().__init__(observers)
        self._random = random.Random(seed)
        self._last_first = seed == 0
        self._rate = 0.0 if self._last_first else self._random.choice(_RATES)
        self._priorities: dict[Task, float] = {}
        self._lowest = 0.0

    def order(self, items: list[Item], room: int) -> list[Item]:
        if self._last_first:
            return [item for end in range(len(items), 0, -room) for item in items[max(end - room, 0) : end]]
        self._random.shuffle(items)
        return items

    def pick(self, items: list[Item]) -> Item:
        return items[-1] if self._last_first else self._random.choice(items)

    def is_patient(self) -> bool:
        return not self._last_first and self._random.random() < _RATE_OF_SIGNALS

    def preempt(self, signals: bool) -> None:
        """A statement has ended: others may run first, in particular waiters for the flag that it `signals`."""
        if signals and self._last_first:
            self.yield_control()
        elif self._random.random() < (max(self._rate, _RATE_OF_SIGNALS) if signals else self._rate):
            self.pause()

    def _step_aside(self) -> None:
        self._lowest -= 1
        self._priorities[self.current] = self._lowest
        super()._step_aside()

    def _next(self) -> Task:
        if self.waiting and self._random.random() < _LOOKS:
            self._look()
        place = max(range(len(self.ready)), key=lambda i: (self._priority(self.ready[i]), i))
        chosen = self.ready[place]
        del self.ready[place]
        return chosen

    def _priority(self, task: Task) -> float:
        if task not in self._priorities:
            self._priorities[task] = 0.0 if self._last_first else self._random.random()
        return self._priorities[task]
