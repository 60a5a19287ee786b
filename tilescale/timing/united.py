# SPDX-License-Identifier: MIT
"""Recording a cluster that executes as one unit: each of its programs does its share of every step, on its own SM."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tilescale.timing.record import HiddenLatency, TaskLog, scaled
from tilescale.timing.steps import AcquireStep, PublishStep, RecordedTask, RendezvousStep, SettleStep, WorkPart


def _of_all(name: str) -> Any:
    """An attribute that all logs have alike."""

    def assign(united: ClusterLog, value: Any) -> None:
        for log in united.logs:
            setattr(log, name, value)

    return property(lambda united: getattr(united.own, name), assign)


class ClusterLog:
    """The logs of a cluster's programs as one; see `TaskLog` for undocumented members.

    Args:
        logs: of the programs, in the order of their ranks.
        own: of the program whose task acts for all.
        barrier_s: that a barrier of the cluster takes.
    """

    family = looks = answers = None
    muted, ahead, parts = map(_of_all, ("muted", "ahead", "parts"))

    def __init__(self, logs: Sequence[TaskLog], own: TaskLog, barrier_s: float):
        self.logs, self.own, self._barrier_s = logs, own, barrier_s
        self._apart = iter(logs)

    @property
    def width(self) -> int:
        """Number of logs a step is written to."""
        return len(self.logs)

    @property
    def task(self) -> RecordedTask:
        return self.own.task

    @property
    def repeats(self) -> int:
        return self.own.repeats

    def place(self, inside: Hashable) -> int:
        return self.own.place(inside)

    def work(self, part: WorkPart, floor_s: float = 0.0, tail_s: float = 0.0, asynchronous: bool = False) -> None:
        """Something that takes time, of which each program does an equal share."""
        (share,) = scaled([part], 1 / self.width)
        for log in self.logs:
            log.work(share, floor_s, tail_s, asynchronous)

    def step(self, step: PublishStep | AcquireStep | RendezvousStep | SettleStep) -> None:
        """Record a step.

        Steps that others observe once are taken by one program after all have arrived; other steps by every program.
        """
        if isinstance(step, RendezvousStep) or isinstance(step, PublishStep) and step.change is not None:
            self._synchronize()
            self.own.step(step)
            self._synchronize()
        else:
            for log in self.logs:
                log.step(step)

    def flush(self) -> None:
        for log in self.logs:
            log.flush()

    def begin_loop(self, times: int) -> None:
        for log in self.logs:
            log.begin_loop(times)

    def end_loop(self, times: int, stages: int, summed: bool = False, hidden: HiddenLatency = None) -> None:
        for log in self.logs:
            log.end_loop(times, stages, summed, hidden)

    def begins(self, unit: str) -> TaskLog:
        """The log of the next program, which acts for itself until `joins`."""
        return next(self._apart)

    def joins(self) -> None:
        """All programs act as one again. They synchronize, except where loads run ahead through a ring of buffers."""
        self._apart = iter(self.logs)
        if not self.own.loops and self.ahead is None:
            self._synchronize()

    def _synchronize(self) -> None:
        place = self.own.place(object())
        for log in self.logs:
            log.step(PublishStep(place, name="arrival"))
        for log in self.logs:
            log.step(AcquireStep(place, self.width, "barrier of the cluster", None, delay_s=self._barrier_s))
