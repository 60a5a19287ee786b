# SPDX-License-Identifier: MIT
"""Flags: the signals that a wait must have seen, in any order of the signals.

A flag's updates are kept in order. A wait that reads an update acquires what was published with that update and those
that it builds on: back to the last store, as a release sequence of C++. An update that the wait could have done without
is not acquired for sure: in another run the others come first. So a wait for too small a count orders none of the
signals that the count leaves out, in any run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilescale.backends.emulator.checks.clocks import Clock, Known, Past


@dataclass(frozen=True)
class Update:
    """One update of a flag.

    Attributes:
        before, value: the flag's value before and after.
        past: what its author knew then; the name of the update.
        releases: whether the past is published with the value.
        stores: whether it replaces the value instead of adding to it.
    """

    before: int
    value: int
    past: Past
    releases: bool = True
    stores: bool = False

    @property
    def added(self) -> int:
        return self.value - self.before

    def knows(self, other: Update) -> bool:
        """Whether it happens after another update in every run. An update happens after itself."""
        return self.past.knows(other.past.clock, other.past.time)


@dataclass
class Flag:
    """The updates of one flag since its last plain write, and the number of them that each task has acquired."""

    value: int
    updates: list[Update] = field(default_factory=list)
    _seen: dict[Clock, int] = field(default_factory=dict)

    def settle(self, value: int) -> None:
        """Make `value` the flag's value: if no update left it, it was a plain write, and updates count from here."""
        if value != self.value:
            self.value, self.updates, self._seen = value, [], {}

    def add(self, update: Update) -> None:
        self.settle(update.before)
        self.updates.append(update)
        self.value = update.value

    def wait(self, clock: Clock, holds: Callable[[Any], bool]) -> tuple[Update | None, Known]:
        """A task has seen that `holds` is true of the value and acquires what it must have seen.

        Returns:
            The earliest update that it may have read, None where the initial value would do; and the knowledge
            common to several updates of which it must have read one.
        """
        first = self._known_until(clock)
        last = self._looked_at(clock, first, holds)
        if last is None:
            return None, {}
        news = [update for i, update in enumerate(self.updates[first:], first) if not self._knows(clock, i)]
        stays = all(holds(u.value) and not u.stores for u in self.updates[last + 1 :])
        for i in range(self._sequence(first, last), last + 1):
            update = self.updates[i]
            needed = update.stores or not stays or not holds(self.value - self._resting_on(i))
            if needed and not self._knows(clock, i) and not _is_replaced(update, news, holds):
                _learn(clock, update)
        one_seen = news and not holds(self.value - sum(update.added for update in news))
        common = _common(news) if one_seen else {}
        clock.learn(common)
        return self.updates[last], common

    def load(self, clock: Clock) -> None:
        """A task has loaded the value with acquire semantics."""
        last = len(self.updates) - 1
        for update in self.updates[self._sequence(self._known_until(clock), last) :]:
            _learn(clock, update)

    def unseen(self, clock: Clock) -> list[Update]:
        """The updates since those that a task has waited for."""
        return self.updates[self._seen.get(clock, 0) :]

    def _known_until(self, clock: Clock) -> int:
        """Length of the longest prefix of the updates that a task knows."""
        first = self._seen.get(clock, 0)
        while first < len(self.updates) and self._knows(clock, first):
            first += 1
        self._seen[clock] = first
        return first

    def _looked_at(self, clock: Clock, first: int, holds: Callable[[Any], bool]) -> int | None:
        """The earliest update that the task may have read; None for the initial value."""
        newest = next((i for i in range(len(self.updates) - 1, first - 1, -1) if self._knows(clock, i)), first - 1)
        if newest < 0 and self.updates and holds(self.updates[0].before):
            return None
        return next((i for i in range(max(newest, 0), len(self.updates)) if holds(self.updates[i].value)), None)

    def _knows(self, clock: Clock, i: int) -> bool:
        past = self.updates[i].past
        return clock.knows(past.clock, past.time)

    def _sequence(self, first: int, last: int) -> int:
        """Index, at least `first`, at which the release sequence of `last` begins."""
        while last > first and not self.updates[last].stores:
            last -= 1
        return last

    def _resting_on(self, first: int) -> int:
        """The part of the value that certainly depends on an update: the update and those that always follow it."""
        origin = self.updates[first]
        return sum(u.added for u in self.updates[first:] if u.knows(origin))


def _learn(clock: Clock, update: Update) -> None:
    if update.releases:
        clock.learn(update.past.known)
        clock.learn({update.past.clock: update.past.time})


def _is_replaced(update: Update, news: Sequence[Update], holds: Callable[[Any], bool]) -> bool:
    """Whether a store that may come first would satisfy the wait as well."""
    return any(holds(u.value) for u in news if u.stores and not u.knows(update))


def _common(updates: Sequence[Update]) -> Known:
    common: Known = {}
    if all(update.releases for update in updates):
        for update in updates:
            for clock, time in update.past.known.items():
                if time > common.get(clock, 0) and all(u.past.knows(clock, time) for u in updates):
                    common[clock] = time
    return common
