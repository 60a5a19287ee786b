# SPDX-License-Identifier: MIT
"""Vector clocks of tasks: what of the others' past each of them must have seen.

A task's time advances when it publishes; what it did until a time is an epoch, a pair (clock, time), as in FastTrack
(Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", PLDI 2009). Vectors are sparse and
never changed, so tasks share them. They leave out what follows from a join: who knows that a parent has seen its
children end knows all that they did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Known = dict["Clock", int]
"""Clock -> the time until which its past is known. Never changed."""


class Clock:
    """One task's.

    Attributes:
        name: the task's.
        depth: how many tasks are above it.
        time: advances when others may see what the task has done.
        known: the past of others that it has seen.
        joined: when its parent saw it end, the parent's clock and time; None before.
        notes: what a check keeps about the task until its time advances.
        waits, signals: flags that it waited for, and signalled, the last ones; for reports.
    """

    __slots__ = ("_given", "depth", "joined", "known", "name", "notes", "signals", "time", "waits")

    def __init__(self, name: str, parent: Clock | None = None):
        self.name, self.time = name, 1
        self.depth = 0 if parent is None else parent.depth + 1
        self.known: Known = {} if parent is None else parent._inheritance()
        self.joined: tuple[Clock, int] | None = None
        self.notes: dict[Any, Any] = {}
        self.waits: tuple[Any, ...] = ()
        self.signals: tuple[Any, ...] = ()
        self._given: Known | None = None

    def knows(self, other: Clock, time: int) -> bool:
        """Whether all that `other` did until `time` happened before now."""
        return _includes(self.known, self, math.inf, other, time)

    def tick(self) -> None:
        """What follows is another epoch: what has been published is what was before."""
        self.time += 1
        self.notes = {}
        self._given = None

    @property
    def past(self) -> Past:
        """All that is known now, the own past included."""
        return Past(self.known, self, self.time)

    def publish(self) -> Past:
        """The past, to be seen by others; what follows is not in it."""
        past = self.past
        self.tick()
        return past

    def learn(self, known: Known) -> None:
        """See what others have published."""
        merged = merge(self.known, known)
        if merged is not self.known:
            self.known, self._given = merged, None

    def join(self, children: Sequence[Clock]) -> None:
        """See the end of tasks that this one has made."""
        self.tick()
        for child in children:
            child.joined = (self, self.time)
        known = self.known
        for child in children:
            known = merge(known, child.known)
        self.known = {c: t for c, t in known.items() if c.joined is None or not self.knows(*c.joined)}

    def _inheritance(self) -> Known:
        """What a task that this one makes now knows."""
        if self._given is None:
            self._given = {**self.known, self: self.time}
        return self._given


@dataclass(frozen=True)
class Past:
    """What a task knew when it published."""

    known: Known
    clock: Clock
    time: int

    def knows(self, other: Clock, time: int) -> bool:
        """Whether it includes all that `other` did until `time`."""
        return _includes(self.known, self.clock, self.time, other, time)


def merge(known: Known, more: Known) -> Known:
    """Both; `known` itself if `more` has nothing new."""
    if known is more:
        return known
    news = {clock: time for clock, time in more.items() if known.get(clock, 0) < time}
    return {**known, **news} if news else known


def _includes(known: Known, own: Clock | None, until: float, other: Clock, time: int) -> bool:
    """Whether all that `other` did until `time` is in `known`, or in what `own` did until then; joins are followed."""
    while not (other is own and time <= until) and known.get(other, 0) < time:
        if other.joined is None:
            return False
        other, time = other.joined
    return True


@dataclass
class Place:
    """A barrier: what all have published there, and who arrived when."""

    known: Known = field(default_factory=dict)
    arrived: Known = field(default_factory=dict)

    def publish(self, past: Past) -> None:
        """A task arrives."""
        self.known = merge(self.known, past.known)
        self.arrived[past.clock] = past.time

    def acquire(self, clock: Clock) -> None:
        """A task leaves."""
        self.known = merge(self.known, self.arrived)
        clock.learn(self.known)

    def knows(self, other: Clock, time: int) -> bool:
        """Whether one who has arrived knows all that `other` did until `time`."""
        self.known = merge(self.known, self.arrived)
        return _includes(self.known, None, 0, other, time)
