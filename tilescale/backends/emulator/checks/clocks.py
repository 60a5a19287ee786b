# SPDX-License-Identifier: MIT
"""Vector clocks of tasks: the events of other tasks that happened before each task's present.

A task's time advances when it publishes. Its events up to a time are an epoch, a pair (clock, time), as in FastTrack
(Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", PLDI 2009). Vectors are sparse and
immutable, so tasks share them. They omit what follows from a join: if a parent has joined its children, knowledge of
the parent's state after the join implies all their events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Known = dict["Clock", int]
"""Clock -> the time until which its past is known. Never changed."""


class Clock:
    """The clock of one task.

    Attributes:
        name: the task's.
        depth: how many tasks are above it.
        time: advances when the task publishes its events.
        known: the events of others that it has acquired.
        joined: the parent's clock and time when it joined the task; None before.
        notes: data of a check about the task, until its time advances.
        waits, signals: the last flags that it waited for, and signalled; for reports.
    """

    __slots__ = ("_given", "depth", "joined", "known", "name", "notes", "signals", "time", "waits")

    def __init__(self, name: str, parent: Clock | None = None):
        self.name, self.time = name, 1
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.known: Known = {} if parent is None else parent._inheritance()
        self.joined: tuple[Clock, int] | None = None
        self.notes: dict[Any, Any] = {}
        self.waits: tuple[Any, ...] = ()
        self.signals: tuple[Any, ...] = ()
        self._given: Known | None = None

    def knows(self, other: Clock, time: int) -> bool:
        """Whether all events of `other` until `time` happened before now."""
        return _includes(self.known, self, math.inf, other, time)

    def tick(self) -> None:
        """Begin a new epoch: only earlier events have been published."""
        self.time += 1
        self.notes = {}
        self._given = None

    @property
    def past(self) -> Past:
        """All that is known now, including this task's past."""
        return Past(self.known, self, self.time)

    def publish(self) -> Past:
        """Publish the past; later events are not in it."""
        past = self.past
        self.tick()
        return past

    def learn(self, known: Known) -> None:
        """Acquire what others have published."""
        merged = merge(self.known, known)
        if merged is not self.known:
            self.known, self._given = merged, None

    def join(self, children: Sequence[Clock]) -> None:
        """Join tasks that this one has made."""
        self.tick()
        for child in children:
            child.joined = (self, self.time)
        known = self.known
        for child in children:
            known = merge(known, child.known)
        self.known = {c: t for c, t in known.items() if c.joined is None or not self.knows(*c.joined)}

    def _inheritance(self) -> Known:
        """The initial knowledge of a task that this one makes now."""
        if self._given is None:
            self._given = {**self.known, self: self.time}
        return self._given


@dataclass(frozen=True)
class Past:
    """The knowledge of a task when it published."""

    known: Known
    clock: Clock
    time: int

    def knows(self, other: Clock, time: int) -> bool:
        """Whether it includes all events of `other` until `time`."""
        return _includes(self.known, self.clock, self.time, other, time)


def merge(known: Known, more: Known) -> Known:
    """The union; `known` itself if `more` has nothing new."""
    if known is more:
        return known
    news = {clock: time for clock, time in more.items() if known.get(clock, 0) < time}
    return {**known, **news} if news else known


def _includes(known: Known, own: Clock | None, until: float, other: Clock, time: int) -> bool:
    """Whether all events of `other` until `time` are in `known`, or those of `own` until then; joins are followed."""
    while not (other is own and time <= until) and known.get(other, 0) < time:
        if other.joined is None:
            return False
        other, time = other.joined
    return True


@dataclass
class Place:
    """A barrier: the union of what all published there, and the arrivals."""

    known: Known = field(default_factory=dict)
    arrived: Known = field(default_factory=dict)

    def publish(self, past: Past) -> None:
        self.known = merge(self.known, past.known)
        self.arrived[past.clock] = past.time

    def acquire(self, clock: Clock) -> None:
        self.known = merge(self.known, self.arrived)
        clock.learn(self.known)

    def knows(self, other: Clock, time: int) -> bool:
        """Whether a task that has arrived knows all events of `other` until `time`."""
        self.known = merge(self.known, self.arrived)
        return _includes(self.known, None, 0, other, time)
