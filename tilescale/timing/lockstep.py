# SPDX-License-Identifier: MIT
"""Units that do the same at the same time: one of them is simulated for all.

Tensor-owning units that take the same steps, synchronize all together, and demand nothing of each other or of a link
that one of them could have before another, are in the same state at all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tilescale.timing.steps import Acquire, Fork, Launch, Owned, Publish, Rendezvous, Task, Work


def in_lockstep(tasks: Sequence[Task]) -> dict[int, tuple[int, ...]] | None:
    """Whether all tasks take the same steps: None if not, else for each rendezvous of all of them, by the identity of
    the first one's step, the rows that synchronize in the order of ranks."""
    if len(tasks) < 2:
        return None
    found = _Same(tasks)
    return found.rendezvous if found.holds() else None


class _Same:
    def __init__(self, tasks: Sequence[Task]):
        self.tasks = tasks
        self.rendezvous: dict[int, tuple[int, ...]] = {}
        # For each task: place of the first one -> its own.
        self._places: list[dict[Any, Any]] = [{} for _ in tasks]

    def holds(self) -> bool:
        return self._steps([task.steps for task in self.tasks])

    def _steps(self, lists: list[list[Any]]) -> bool:
        first = lists[0]
        if all(steps is first for steps in lists):
            return True  # Only programs that demand nothing of others share steps.
        if any(len(steps) != len(first) for steps in lists):
            return False
        return all(self._step(list(alike)) for alike in zip(*lists, strict=True))

    def _step(self, steps: list[Any]) -> bool:
        first = steps[0]
        if any(type(step) is not type(first) for step in steps):
            return False
        if isinstance(first, Work):
            return _is_own(first) and all(_equal(first, step) for step in steps)
        if isinstance(first, Rendezvous):
            return self._join(steps)
        if isinstance(first, Publish | Acquire):
            return self._order(steps)
        if isinstance(first, Fork | Launch):
            return all(_equal(first, step, "tasks") for step in steps) and self._family([s.tasks for s in steps])
        return all(step == first for step in steps)

    def _family(self, lists: list[list[Task]]) -> bool:
        first = lists[0]
        if all(tasks is first for tasks in lists):
            return True
        if any(len(tasks) != len(first) for tasks in lists):
            return False
        return all(self._steps([task.steps for task in alike]) for alike in zip(*lists, strict=True))

    def _join(self, steps: list[Rendezvous]) -> bool:
        first = steps[0]
        if not all(_equal(first, step, "place", "rank", "work") for step in steps):
            return False
        if all(step.place == first.place for step in steps) and first.size == len(steps):
            rows = {step.rank: task.row for step, task in zip(steps, self.tasks, strict=True)}
            self.rendezvous[id(first)] = tuple(rows[rank] for rank in sorted(rows))
            return len(rows) == len(steps)
        return self._renamed(steps) and all(step.rank == first.rank for step in steps)

    def _order(self, steps: list[Any]) -> bool:
        """Barriers inside a unit; flags are seen by others, and their values are the record's."""
        if any(getattr(step, "change", None) or getattr(step, "holds", None) for step in steps):
            return False
        return all(_equal(steps[0], step, "place") for step in steps) and self._renamed(steps)

    def _renamed(self, steps: list[Any]) -> bool:
        """Whether the places of each task are those of the first one under other names, and no other task's."""
        for step, places in zip(steps, self._places, strict=True):
            if places.setdefault(steps[0].place, step.place) != step.place:
                return False
        return len({step.place for step in steps}) == len(steps)


def _is_own(step: Any) -> bool:
    """Whether a step demands nothing that other units could demand too."""
    if not isinstance(step, Work):
        return True
    keys = (key for part in step.parts for key in part.demands)
    return all(isinstance(key, str) or (isinstance(key, Owned) and key.row is None) for key in keys)


def _equal(a: Any, b: Any, *besides: str) -> bool:
    return a is b or all(getattr(a, f.name) == getattr(b, f.name) for f in fields(a) if f.name not in besides)
