# SPDX-License-Identifier: MIT
"""Barriers inside a program and a cluster: mbarriers with phases, named barriers, cluster barriers (PTX ISA, section
"Parallel Synchronization and Communication Instructions").

Asynchronous copies complete at once, so the transaction counts of an mbarrier are always complete and only arrivals
count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.tasks import Wait
from tilescale.errors import Location


@dataclass(eq=False)
class MBarrier:
    """An arrival barrier whose phase flips when `count` threads have arrived."""

    name: str
    count: int
    pending: int
    phase: int = 0

    def arrive(self, threads: int, frame: Frame, where: Location | None) -> None:
        frame.run.scheduler.progress += 1
        while threads:
            frame.run.publishes((self, self.phase))
            taken = min(threads, self.pending)
            self.pending -= taken
            threads -= taken
            if self.pending == 0:
                for observer in frame.run.listeners:
                    observer.completes(self, self.phase, where)
                self.phase += 1
                self.pending = self.count

    def wait(self, parity: int, frame: Frame, where: Location | None) -> None:
        """Block until the phase of that parity has completed."""
        frame.run.scheduler.block(
            Wait(
                lambda: self.phase & 1 != parity,
                f"barrier {self.name}, phase parity {parity}",
                lambda: f"{self.count - self.pending} of {self.count} arrivals in phase {self.phase}",
                where,
                self._missed,
            )
        )
        # The completed phase; in the first phase a wait for the one before it returns at once.
        for observer in frame.run.listeners:
            observer.passes(frame, self, self.phase - 1, where)


    def _missed(self) -> str:
        """A hint for a wait that may have come too late: until the next phase but one ends, the parity is the same."""
        if self.phase < 2:
            return ""
        return (
            f"phase {self.phase - 2}, which has the same parity, is over, and so is phase {self.phase - 1}: if the "
            f"wait is for phase {self.phase - 2}, let no thread arrive at phase {self.phase - 1} before it has passed"
        )


@dataclass(eq=False)
class CountingBarrier:
    """A barrier that completes each time `expected` threads have arrived."""

    arrived: int = 0
    generation: int = 0
    tickets: dict[Any, int] = field(default_factory=dict)

    def arrive(self, threads: int, expected: int, frame: Frame) -> int:
        """Arrive without waiting; returns the generation to wait for."""
        frame.run.scheduler.progress += 1
        ticket = self.generation
        frame.run.publishes((self, ticket))
        self.arrived += threads
        if self.arrived >= expected:
            self.arrived -= expected
            self.generation += 1
        return ticket

    def wait(self, ticket: int, what: str, expected: int, frame: Frame, where: Location | None) -> None:
        """Block until the generation of `ticket` is over."""
        frame.run.scheduler.block(
            Wait(lambda: self.generation > ticket, what, lambda: f"{self.arrived} of {expected} threads", where)
        )
        frame.run.acquires((self, ticket))


@dataclass
class Participants:
    """The threads of a plain barrier: a program's, or those of one side of a branch."""

    threads: int
    barrier: CountingBarrier = field(default_factory=CountingBarrier)

    def sync(self, frame: Frame, where: Location | None) -> None:
        """All threads arrive; those of one coroutine run in lockstep anyway."""
        mine = frame.threads if frame.own is None else int(np.count_nonzero(frame.own))
        if mine < self.threads:
            ticket = self.barrier.arrive(mine, self.threads, frame)
            self.barrier.wait(ticket, "all threads to synchronise", self.threads, frame, where)
