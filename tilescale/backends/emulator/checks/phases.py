# SPDX-License-Identifier: MIT
"""Phases of mbarriers that complete too early: before a waiter has seen the previous phase.

A wait names the parity of a phase (PTX ISA, mbarrier.test_wait). If the next phase completes first, the wait is for the
phase after that, which may never complete. So at least one arrival at the next phase must happen after the wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilescale.backends.emulator.checks.clocks import Clock, Place
from tilescale.backends.emulator.checks.text import acting
from tilescale.backends.emulator.execute.barriers import MBarrier
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location, RaceError


@dataclass(frozen=True)
class _Wait:
    """A completed wait: unit, task's clock and time, line."""

    clock: Clock
    time: int
    unit: Unit
    where: Location | None


class Phases:
    """The waits for the last phase of each barrier."""

    def __init__(self, rests: Callable[[Place, Clock, int], None]) -> None:
        """`rests` is called for each wait that an arrival had to happen after."""
        self._rests = rests
        self._waits: weakref.WeakKeyDictionary[MBarrier, list[_Wait]] = weakref.WeakKeyDictionary()

    def passes(self, barrier: MBarrier, clock: Clock, unit: Unit, where: Location | None) -> None:
        """A task continues after a wait."""
        self._waits.setdefault(barrier, []).append(_Wait(clock, clock.time, unit, where))

    def ends(self, barrier: MBarrier, phase: int, arrivals: Place, where: Location | None) -> None:
        """All threads have arrived at a phase. Raises RaceError if none knows of a wait for the previous phase."""
        for wait in self._waits.pop(barrier, ()):
            if not arrivals.knows(wait.clock, wait.time):
                raise _error(barrier.name, phase, wait, where)
            self._rests(arrivals, wait.clock, wait.time)


def _error(barrier: str, phase: int, wait: _Wait, where: Location | None) -> RaceError:
    before = f"phase {phase - 1}" if phase else "the phase before the first"
    places = (wait.where, "waits here"), (where, f"phase {phase} ends here")
    who = acting(wait.unit, wait.clock.name)
    error = RaceError(
        f"{barrier}: {who} waits for {before}, and phase {phase} may end before it looks: then it waits for phase "
        f"{phase + 1}",
        hint="a second barrier for the way back: T.barrier_arrive(taken) after the wait, and T.barrier_wait(taken, "
        f"...) before the next arrival at {barrier}",
        where=[replace(place, what=what) for place, what in places if place],
    )
    error.located = True
    return error
