# SPDX-License-Identifier: MIT
"""Redundant waits: synchronization that no access needs.

A wait acquires what others did before they signalled. It is needed if a later access, in its task or in one that
synchronizes with it later, is to an element that one of those accesses was to; if memory that others have accessed
returns to its unit; or if another needed wait depends on its signals. What a task knew before, from a barrier or
another wait, does not count. So all redundant waits could be deleted at once, and each two accesses to an element would
have the same order. Where one of several would do, all may count as needed. Waits for the initial value of a flag, or
for signals of their own task, are not reported. The result holds for one run: with more iterations, or on more units, a
wait may be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilescale.backends.emulator.checks.clocks import Clock, Past, Place
from tilescale.backends.emulator.checks.flags import Flag
from tilescale.backends.emulator.checks.states import Access, State
from tilescale.backends.emulator.interpret.buffers import Home

Knower = Clock | Past | Place

News = dict[Clock, dict[Clock, tuple[int, int, int]]]
"""Task that acted -> task that acquired it -> the time of the wait, and the begin and end of the acquired interval."""


class RedundantWaits:
    """The waits of a run, by name of the flag and line, and those on which an access depends."""

    def __init__(self) -> None:
        self._open: dict[Any, News] = {}  # waits not known to be needed
        self._needed: set[Any] = set()
        self._basis: dict[Any, set[Any]] = {}  # a needed wait -> the waits that it depends on
        self._waits: dict[Home, Any] = {}

    def wait(self, home: Home, flag: Flag, clock: Clock, holds: Callable[[Any], bool]) -> None:
        """A task waits for a flag, and acquires what it must have seen."""
        past, wait, signals = clock.past, (home.name, home.where), flag.unseen(clock)
        seen, common = flag.wait(clock, holds)
        for other, time in common.items():  # Several tasks published this; a wait for any of them would do.
            self._rests(other, time, [signal.past for signal in signals], wait)
        if wait not in self._needed and seen is not None and seen.past.clock is not clock:
            self._waits[home] = wait
            _extend(self._open.setdefault(wait, {}), past, clock)

    def ordered(self, state: State, access: Access) -> None:
        """An access happens after others to the same element."""
        if self._open:
            wait = self._waits.get(access.home)  # a wait's read of its flag is needed as far as the wait is
            for other in state.accesses():
                if other.clock is not access.clock:
                    self._rests(other.clock, other.time, (access.clock,), wait)

    def rests(self, knower: Knower, clock: Clock, time: int) -> None:
        """An access depends on `knower` having acquired what `clock` did until `time`."""
        self._rests(clock, time, (knower,))

    def _rests(self, clock: Clock, time: int, knowers: Sequence[Knower], user: Any = None) -> None:
        found = [wait for wait, news in self._open.items() if _may_have_acquired(news, clock, time, knowers)]
        if user is None or user in self._needed:
            for wait in found:
                self._need(wait)
        elif found:
            self._basis.setdefault(user, set()).update(found)

    def _need(self, what: Any) -> None:
        if what not in self._needed:
            self._needed.add(what)
            self._open.pop(what, None)
            for each in self._basis.pop(what, ()):
                self._need(each)

    @property
    def left(self) -> list[tuple[str, Any]]:
        """The redundant waits: the flag's name and the line."""
        return list(self._open)


def _extend(news: News, past: Past, clock: Clock) -> None:
    """Add what a task knows that was not in its past before a wait."""
    for other, time in clock.known.items():
        if not past.knows(other, time):
            after = past.known.get(other, 0)
            first = news.setdefault(other, {}).get(clock, (clock.time, after, time))
            news[other][clock] = first[0], min(first[1], after), max(first[2], time)


def _may_have_acquired(news: News, clock: Clock, time: int, knowers: Sequence[Knower]) -> bool:
    """Whether some of `knowers` may have acquired from these waits what `clock` did until `time`."""
    waits = [
        (waiter, since)
        for other, until in _steps(clock, time)
        for waiter, (since, after, last) in news.get(other, {}).items()
        if after < until <= last
    ]
    return bool(waits) and any(knower.knows(*wait) for knower in knowers for wait in waits)


def _steps(clock: Clock, time: int) -> Iterator[tuple[Clock, int]]:
    """An epoch, and those in which it was joined."""
    yield clock, time
    while clock.joined is not None:
        clock, time = clock.joined
        yield clock, time
