# SPDX-License-Identifier: MIT
"""Events in simulated time, and resources that share themselves among their users.

A resource is a processor-sharing server (Kleinrock, "Time-shared Systems: a theoretical treatment", 1967): n users get
1/n of it each. SimGrid's fluid models (Casanova et al., 2014) couple the shares of a flow over all links that it
crosses; here a step's demands are met independently of each other, and it ends with the last. That lets a start or end
touch one resource instead of all, at the price of some optimism where flows of different bottlenecks meet.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Events:
    """What happens when. Events of the same moment happen in the order in which they were announced.

    Attributes:
        now: simulated seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Action) -> None:
        """Call `action` at a time, now at the earliest."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), action))

    def run(self) -> None:
        """Let everything happen, also what follows from it."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()


class Server:
    """A resource that can do one second of work in a second, evenly for all whom it serves at a time.

    Its own clock counts the work that each of its users has got since they came: who wants `seconds` of it is done when
    that clock has advanced so far. So nothing changes for those who stay when others come or go.

    Attributes:
        busy_s: work that it was asked for so far.
    """

    __slots__ = ("_events", "_jobs", "_order", "_plan", "_since", "_work", "busy_s")

    def __init__(self, events: Events):
        self._events = events
        self._jobs: list[tuple[float, int, Action]] = []
        self._order = itertools.count()
        self._plan = 0
        self._since = 0.0
        self._work = 0.0
        self.busy_s = 0.0

    def serve(self, seconds: float, done: Action) -> None:
        """Do `seconds` of work, then call `done`."""
        self._advance()
        self.busy_s += seconds
        heapq.heappush(self._jobs, (self._work + seconds, next(self._order), done))
        self._announce()

    def _advance(self) -> None:
        now = self._events.now
        if self._jobs:
            self._work += (now - self._since) / len(self._jobs)
        self._since = now

    def _announce(self) -> None:
        """The next end, as things stand; what was announced before no longer holds."""
        self._plan += 1
        if self._jobs:
            plan, left = self._plan, self._jobs[0][0] - self._work
            self._events.at(self._events.now + left * len(self._jobs), lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._since, self._work = self._events.now, self._jobs[0][0]
        ended = []
        while self._jobs and self._jobs[0][0] <= self._work:
            ended.append(heapq.heappop(self._jobs)[2])
        self._announce()
        for done in ended:
            done()
