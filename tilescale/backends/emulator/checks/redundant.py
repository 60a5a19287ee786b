# SPDX-License-Identifier: MIT
"""Waits that no access needs: redundant synchronisation.

A wait tells its task what others did until they signalled. It is needed if an access that comes after it, in that task
or where it is passed on to, is to an element that one of those accesses was to; if a unit gets its memory back that
others have accessed; or if a wait that is needed has to know of its signals. What a task knew before, from a barrier or
another wait, is no news. So all waits that are left could be deleted at once, and each two accesses to an element would
have the same order. Where one of several would do, all may count as needed; and nothing is said of waits that were only
for a value that the flag had from the beginning, or for signals of their own task. All that is said of one run: with
more iterations, or on more units, a wait may be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tilescale.backends.emulator.checks.clocks import Clock, Past, Place
from tilescale.backends.emulator.checks.flags import Flag
from tilescale.backends.emulator.checks.states import Access, State

if TYPE_CHECKING:
    from tilescale.backends.emulator.interpret.buffers import Home

Knower = Clock | Past | Place

News = dict[Clock, dict[Clock, tuple[int, int, int]]]
"""Who did something -> who was told -> the time of the wait that told it, and after and until when the other did it."""


class RedundantWaits:
    """The waits of a run, by name of the flag and line, and which of them something rests on."""

    def __init__(self) -> None:
        self._open: dict[Any, News] = {}  # those that nothing is known to rest on
        self._needed: set[Any] = set()
        self._basis: dict[Any, set[Any]] = {}  # a wait -> those that it rests on, if it is needed
        self._waits: dict[Home, Any] = {}

    def wait(self, home: Home, flag: Flag, clock: Clock, holds: Callable[[Any], bool]) -> None:
        """A task waits for a flag, and learns what it must have seen."""
        past, wait, signals = clock.past, (home.name, home.where), flag.unseen(clock)
        seen, common = flag.wait(clock, holds)
        for other, time in common.items():  # It heard one of several tasks, any of which would have told that.
            self._rests(other, time, [signal.past for signal in signals], wait)
        if wait not in self._needed and seen is not None and seen.past.clock is not clock:
            self._waits[home] = wait
            _extend(self._open.setdefault(wait, {}), past, clock)

    def ordered(self, state: State, access: Access) -> None:
        """An access comes after others to an element."""
        if self._open:
            wait = self._waits.get(access.home)  # A wait's own look at its flag is worth what the wait is.
            for other in state.accesses():
                if other.clock is not access.clock:
                    self._rests(other.clock, other.time, (access.clock,), wait)

    def rests(self, knower: Knower, clock: Clock, time: int) -> None:
        """It matters that somebody knows what `clock` did until `time`."""
        self._rests(clock, time, (knower,))

    def _rests(self, clock: Clock, time: int, knowers: Sequence[Knower], user: Any = None) -> None:
        found = [wait for wait, news in self._open.items() if _has_told(news, clock, time, knowers)]
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
        """Those that nothing rests on: the flag's name and the line."""
        return list(self._open)


def _extend(news: News, past: Past, clock: Clock) -> None:
    """Add what a task knows that was not in its past before a wait."""
    for other, time in clock.known.items():
        if not past.knows(other, time):
            after = past.known.get(other, 0)
            first = news.setdefault(other, {}).get(clock, (clock.time, after, time))
            news[other][clock] = first[0], min(first[1], after), max(first[2], time)


def _has_told(news: News, clock: Clock, time: int, knowers: Sequence[Knower]) -> bool:
    """Whether some of `knowers` may know from these waits what `clock` did until `time`."""
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
