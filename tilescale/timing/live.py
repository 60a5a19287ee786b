# SPDX-License-Identifier: MIT
"""State of a running task in a simulation, and of a place where tasks publish and wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.timing.steps import AcquireStep, PublishStep, RecordedTask


class RunningTask:
    """A running task.

    Attributes:
        row, unit: number of the tensor-owning unit that it belongs to, and its readable name.
        place: row and number of the program unit on which it runs, None for phases of a tensor-owning unit.
        scope: identity of the tasks whose places its steps name by number.
        engine: what its spans are shown on.
        ended: called with it at its end. It holds no reference to itself: a record is freed with its last user.
        last: the span that it last depended on, as a position.
        visible_s: when all that it did is visible to others.
    """

    __slots__ = (
        "ahead", "at", "ended", "engine", "held", "last", "place", "row", "scope", "since", "task", "unit", "visible_s",
        "waits",
    )  # fmt: skip

    def __init__(
        self,
        task: RecordedTask,
        parent: RunningTask | None,
        place: tuple[int, int] | None,
        engine: str,
        ended: Callable[[RunningTask], None],
    ):
        self.task, self.place, self.engine, self.ended = task, place, engine, ended
        self.row, self.unit = task.row, task.unit
        self.scope = object()
        self.last: int | None = None
        if parent is not None:
            self.row, self.scope, self.last = parent.row, parent.scope, parent.last
            self.unit = f"{parent.unit}, {task.unit}" if task.unit else parent.unit
        self.at = 0
        self.visible_s = 0.0
        # Tokens of works that run ahead of it, how many it waits to have left, and publications that wait for some.
        self.ahead: set[object] = set()
        self.waits: int | None = None
        self.held: list[tuple[set[object], PublishStep]] = []
        self.since = 0.0


class PublicationPoint:
    """A place where tasks publish, and the tasks that wait there."""

    __slots__ = ("count", "last", "shown_s", "value", "waiting")

    def __init__(self, value: Any):
        self.value, self.count, self.shown_s = value, 0, 0.0
        self.last: int | None = None
        self.waiting: list[tuple[RunningTask, AcquireStep]] = []

    def open_to(self, step: AcquireStep) -> bool:
        """Whether a wait is over."""
        return self.count >= step.count or (step.holds is not None and step.holds(self.value))
