# SPDX-License-Identifier: MIT
"""Flags: what a wait must have seen, whatever order the signals came in.

A flag's updates are kept in their order. A wait that looks at an update sees what was published with it and with those
that it builds on: back to the last store, as a release sequence of C++. But an update that the wait could have done
without is not seen for sure: in another run the others come first. So a wait for too small a count orders nothing that
is left out of the count, in every run.
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
        past: what its author knew then; what it is.
        releases: whether that is published with the value.
        stores: whether it replaces the value, and does not build on it.
    """

    before: int
    value: int
    past: Past
    releases: bool = True
    stores: bool = False

    @property
    def added(self) -> int:
        """By how much the value changed."""
        return self.value - self.before

    def knows(self, other: Update) -> bool:
        """Whether it comes after another one in every run; each does so after itself."""
        return self.past.knows(other.past.clock, other.past.time)


@dataclass(eq=False)
class Flag:
    """The updates of one flag since it was last plainly written, and up to where each task has seen all of them."""

    value: int
    updates: list[Update] = field(default_factory=list)
    _seen: dict[Clock, int] = field(default_factory=dict)

    def settle(self, value: int) -> None:
        """The flag has this value: if no update left it there, it was written plainly, and counts from here."""
        if value != self.value:
            self.value, self.updates, self._seen = value, [], {}

    def add(self, update: Update) -> None:
        """An update was made."""
        self.settle(update.before)
        self.updates.append(update)
        self.value = update.value

    def wait(self, clock: Clock, holds: Callable[[Any], bool]) -> tuple[Update | None, Known]:
        """A task has seen that `holds` is true of the value: it learns what it must have seen.

        Returns:
            The earliest update that it may have looked at, None where the value before all of them would do; and what
            it has learnt since all of several updates publish it, one of which it has seen.
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
        """A task has loaded the value, to acquire what was published with it."""
        last = len(self.updates) - 1
        for update in self.updates[self._sequence(self._known_until(clock), last) :]:
            _learn(clock, update)

    def unseen(self, clock: Clock) -> list[Update]:
        """The updates since those that a task has waited for."""
        return self.updates[self._seen.get(clock, 0) :]

    def _known_until(self, clock: Clock) -> int:
        """How many of the first updates a task knows, without a gap."""
        first = self._seen.get(clock, 0)
        while first < len(self.updates) and self._knows(clock, first):
            first += 1
        self._seen[clock] = first
        return first

    def _looked_at(self, clock: Clock, first: int, holds: Callable[[Any], bool]) -> int | None:
        """The earliest update that the task may have looked at; None for the value before all of them."""
        newest = next((i for i in range(len(self.updates) - 1, first - 1, -1) if self._knows(clock, i)), first - 1)
        if newest < 0 and self.updates and holds(self.updates[0].before):
            return None
        return next((i for i in range(max(newest, 0), len(self.updates)) if holds(self.updates[i].value)), None)

    def _knows(self, clock: Clock, i: int) -> bool:
        past = self.updates[i].past
        return clock.knows(past.clock, past.time)

    def _sequence(self, first: int, last: int) -> int:
        """Where the updates begin, from `first` on, that `last` builds on."""
        while last > first and not self.updates[last].stores:
            last -= 1
        return last

    def _resting_on(self, first: int) -> int:
        """What the flag's value would lack without an update and those that come after it for sure."""
        origin = self.updates[first]
        return sum(u.added for u in self.updates[first:] if u.knows(origin))


def _learn(clock: Clock, update: Update) -> None:
    if update.releases:
        clock.learn(update.past.known)
        clock.learn({update.past.clock: update.past.time})


def _is_replaced(update: Update, news: Sequence[Update], holds: Callable[[Any], bool]) -> bool:
    """Whether a store that may come first would do as well."""
    return any(holds(u.value) for u in news if u.stores and not u.knows(update))


def _common(updates: Sequence[Update]) -> Known:
    """What all updates publish."""
    common: Known = {}
    if all(update.releases for update in updates):
        for update in updates:
            for clock, time in update.past.known.items():
                if time > common.get(clock, 0) and all(u.past.knows(clock, time) for u in updates):
                    common[clock] = time
    return common
