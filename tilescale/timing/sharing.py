# SPDX-License-Identifier: MIT
"""Events in simulated time, and resources that share themselves among their users.

A resource is a time-sharing server (Kleinrock, "Time-shared Systems: a theoretical treatment", 1967): users get shares
of it in proportion to their weights. SimGrid's fluid models (Casanova et al., 2014) couple the shares of a flow over
all links that it crosses; here the demands of a step are independent of each other, and the step ends with the last. So
a start or end touches one resource instead of all, at the price of some optimism where flows of different bottlenecks
share a resource.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from functools import partial

Action = Callable[[], None]

ROUNDING = 1e-12
"""Moments that are closer together than this share of the time that has passed are the same."""


class EventQueue:
    """The event queue. Events of the same moment happen in the order in which they were announced. `now`: simulated
    seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Action) -> None:
        """Call `action` at a time, now at the earliest."""
        heapq.heappush(self._queue, (time if time > self.now else self.now, next(self._order), action))

    def run(self) -> None:
        """Process all events, including those that they announce."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()


class SharedResource:
    """A resource that does one second of work in a second, shared by its concurrent users.

    Its own clock counts the work that a user of weight 1 has received: a user that needs `seconds` is done when the
    clock has advanced by `seconds / weight`. So arrivals and departures change nothing for the other users. `busy_s`:
    work requested until now.
    """

    __slots__ = ("_due", "_events", "_jobs", "_order", "_plan", "_since", "_weight", "_work", "busy_s")

    def __init__(self, events: EventQueue):
        self._events = events
        self._jobs: list[tuple[float, int, Action, int]] = []
        self._weight = 0
        self._order = 0
        self._plan = 0
        self._due = math.inf
        self._since = 0.0
        self._work = 0.0
        self.busy_s = 0.0

    def serve(self, seconds: float, done: Action, weight: int = 1) -> None:
        """Do `seconds` of work for a user of weight `weight`, then call `done`."""
        self._advance()
        self.busy_s += seconds
        self._order += 1
        self._weight += weight
        heapq.heappush(self._jobs, (self._work + seconds / weight, self._order, done, weight))
        # Another user can only delay the others: announced completions are at most too early.
        due = self._next()
        if due < self._due:
            self._announce(due)

    def _advance(self) -> None:
        now = self._events.now
        if self._jobs:
            self._work += (now - self._since) / self._weight
        self._since = now

    def _next(self) -> float:
        """Time of the next completion with the current users."""
        return self._events.now + (self._jobs[0][0] - self._work) * self._weight

    def _announce(self, due: float) -> None:
        self._plan += 1
        plan, self._due = self._plan, due
        self._events.at(due, partial(self._look, plan))

    def _look(self, plan: int) -> None:
        """Check for completed users."""
        if plan != self._plan:
            return
        self._due = math.inf
        self._advance()
        jobs, ended = self._jobs, []
        if self._next() <= self._events.now * (1 + ROUNDING):
            self._work = jobs[0][0]
        while jobs and jobs[0][0] <= self._work:
            _, _, done, weight = heapq.heappop(jobs)
            self._weight -= weight
            ended.append(done)
        if jobs:
            self._announce(self._next())
        for done in ended:
            done()
