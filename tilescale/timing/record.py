# SPDX-License-Identifier: MIT
"""Recording of a task's steps, with loops as wholes.

A loop without synchronisation becomes a few steps, however often it runs: its operations are collected, and at its end
their sum is one step. In a software-pipelined loop loads and GEMMs overlap, in others they alternate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from tilescale.timing.steps import (
    AcquireStep,
    ForkStep,
    LaunchStep,
    PublishStep,
    RecordedTask,
    RendezvousStep,
    SettleStep,
    WorkPart,
    WorkStep,
    merged,
)

ROUNDS = 8
"""A loop that is not pipelined is simulated in at most this number of steps, each of several iterations."""

UNBOUNDED = 1 << 30
"""Asynchronous copies that may run at once."""

HiddenLatency = Callable[[int, float], float] | None
"""The number of loads and their bytes -> the latencies that overlap, in seconds; None: each load waits for the last."""


@dataclass(frozen=True)
class CacheLookup:
    """A tile that a task touches.

    Attributes:
        frame: the state in which it does.
        tile: maps a frame to the tile's identity and bytes.
        times: how often it does.
        found: whether the cache had it, and how many bytes there are.
    """

    frame: Any
    tile: Callable[[Any], tuple[Hashable, int]]
    times: int
    found: tuple[bool, int]


class TaskLog:
    """The record of one task.

    Attributes:
        task: the steps.
        family: the step whose tasks are being made now.
        muted: whether nothing is recorded: iterations of a loop that repeat the first one.
        ahead: the largest number of copies that run ahead of the task; None: they do not.
        looks: accesses to tiles in the memory that holds tensors; None where the cache is not modelled.
        answers: whether the cache has each of these tiles, where that was found before.
        primed: whether the first loads of a pipelined loop have been made before it begins.
        parts: in a loop with one buffer for each tile, the parts of it that thread groups hand over one by one; else 0.
    """

    width = 1
    """Number of tasks a step is recorded for."""

    def __init__(self, task: RecordedTask, parent: TaskLog | None = None):
        self.task, self.parent = task, parent
        self.family: ForkStep | LaunchStep | None = None
        self.sides: list[TaskLog] = []
        self.muted: bool = parent.muted if parent is not None else False
        self.ahead: int | None = None
        self.looks: list[CacheLookup] | None = parent.looks if parent is not None else None
        self.answers: Iterator[bool] | None = parent.answers if parent is not None else None
        self.primed = False
        self.parts = 0
        self._loads: list[WorkStep] = []
        # Works of the loops around, the innermost last.
        self.loops: list[list[WorkStep]] = []
        self._times: list[int] = list(parent._times) if parent is not None else []
        # Places of the task's scope, by number.
        self.places: dict[Hashable, int] = parent.places if parent is not None else {}
        # A part of a program inside a collected loop is collected itself.
        self.collected = bool(parent is not None and parent.loops)
        if self.collected:
            self.loops.append([])

    # -- steps ---------------------------------------------------------------------------------------------------------

    def work(self, part: WorkPart, floor_s: float = 0.0, tail_s: float = 0.0, asynchronous: bool = False) -> None:
        """Something that takes time. Transfers run ahead where the loop around lets them."""
        if self.muted:
            return
        ahead = UNBOUNDED if asynchronous else self.ahead if part.kind == "transfer" else None
        work = WorkStep([part], floor_s, tail_s, ahead)
        if self.parts and part.kind == "transfer" and not self.loops:
            self._loads.append(work)
            return
        self._load()
        self._collect(work)

    def _collect(self, work: WorkStep) -> None:
        (self.loops[-1] if self.loops else self.task.steps).append(work)

    def step(self, step: PublishStep | AcquireStep | RendezvousStep | SettleStep) -> None:
        """Record a step that orders tasks. Collected works precede it."""
        if not self.muted:
            self.flush()
            self.task.steps.append(step)

    def _load(self) -> None:
        """Wait for the last loads. The task waits for one part of them; it continued with others meanwhile."""
        loads, self._loads = self._loads, []
        if loads:
            share, floor = 1 / self.parts, max(work.floor_s for work in loads)
            self.task.steps.append(WorkStep(scaled(_sum(loads, 1), share), floor * share))
            if self.parts > 1:
                others = scaled(_sum(loads, 1), 1 - share)
                self.task.steps.append(WorkStep(others, floor * (1 - share), ahead=1))

    def place(self, inside: Hashable) -> int:
        """The number of a place, such as a flag or a barrier, in the task's scope."""
        return self.places.setdefault(inside, len(self.places))

    def flush(self) -> None:
        """Write down the collected works of all loops around as they are: they cannot be taken together."""
        self._load()
        for works in self.loops:
            self.task.steps += works
            works.clear()

    # -- loops ---------------------------------------------------------------------------------------------------------

    @property
    def repeats(self) -> int:
        """Number of repetitions of the recorded steps."""
        return math.prod(self._times)

    def begin_loop(self, times: int) -> None:
        """Collect works from now on, each of which counts `times` times."""
        self._load()
        self.loops.append([])
        self._times.append(times)

    def end_loop(self, times: int, stages: int, summed: bool = False, hidden: HiddenLatency = None) -> None:
        """End the collection; the works are those of all `times` iterations if `summed`, else of one iteration. With 2
        or more `stages`, loads overlap with the following works. With `hidden` those of all iterations overlap."""
        works = self.loops.pop()
        self._times.pop()
        if self.muted or not works or times < 1:
            return
        if summed:
            works = [
                WorkStep(scaled(work.parts, 1 / times), work.floor_s / times, work.tail_s / times) for work in works
            ]
        if hidden is not None:
            self._collect(at_once(works, times, hidden))
        elif self.loops:
            self.loops[-1].append(together(works, times, stages))
        elif stages > 1:
            self._pipelined(works, times, stages)
        else:
            self.task.steps += one_after_another(works, times)

    def _pipelined(self, works: list[WorkStep], times: int, stages: int) -> None:
        self.task.steps += pipelined(works, times, stages, self.primed)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def launch(self, launch: LaunchStep) -> None:
        """The tasks that this one makes from now on are programs of a grid."""
        self.flush()
        self.family = launch
        self.task.steps.append(launch)

    def begins(self, unit: str) -> TaskLog:
        self._load()
        side = TaskLog(RecordedTask(unit, self.task.row), self)
        if isinstance(self.family, LaunchStep) and self.family.alike:
            side.places = {}
        if self.muted or side.collected:
            self.sides.append(side)
            return side
        if self.family is None:
            self.family = ForkStep()
            self.task.steps.append(self.family)
        self.family.tasks.append(side.task)
        return side

    def joins(self) -> None:
        """The tasks that this one has made have ended."""
        self.family = None
        sides, self.sides = self.sides, []
        works = [chained(side.loops[0]) for side in sides if side.loops and side.loops[0]]
        if works and not self.muted:
            floor = max(work.floor_s for work in works)
            self.loops[-1].append(WorkStep([part for work in works for part in work.parts], floor))


def alone(work: WorkStep) -> float:
    """Seconds of a step on an idle machine."""
    demands = [seconds for part in work.parts for seconds in part.demands.values()]
    return max([work.floor_s, *demands])


def chained(works: list[WorkStep]) -> WorkStep:
    """Steps after one another as one step, which takes at least as long as they take on an idle machine."""
    return WorkStep(_sum(works, 1), sum(alone(work) for work in works))


def together(works: list[WorkStep], times: int, stages: int) -> WorkStep:
    """A loop inside another one as one step."""
    chain = _round(works) if stages > 1 else sum(alone(work) for work in works)
    return WorkStep(_sum(works, times), chain + (times - 1) * chain / stages)


def at_once(works: list[WorkStep], times: int, hidden: Callable[[int, float], float]) -> WorkStep:
    """An unrolled loop, whose loads are in flight together, as one step."""
    loads = [work.parts[0].nbytes for work in works if work.parts[0].kind == "transfer"]
    saved = hidden(times * len(loads), times * sum(loads))
    return WorkStep(_sum(works, times), times * sum(map(alone, works)) - saved)


def one_after_another(works: list[WorkStep], times: int) -> list[WorkStep]:
    """A loop whose operations wait for each other: a few rounds, each of several iterations."""
    rounds = min(times, ROUNDS) if len(works) > 1 else 1
    share = times / rounds
    round_ = [WorkStep(scaled(work.parts, share), work.floor_s * share, work.tail_s, work.ahead) for work in works]
    return round_ * rounds


def pipelined(works: list[WorkStep], times: int, stages: int, primed: bool = False) -> list[WorkStep]:
    """A software-pipelined loop: its first loads, unless they are made before (`primed`), then everything side by side.

    Each of its `stages` buffers cycles through load, wait, GEMM; so an iteration takes at least a round's time divided
    by the buffers, even on an idle machine.
    """
    loads = [work for work in works if work.parts[0].kind == "transfer"]
    round_ = _round(works)
    rest = [work for work in works if work.parts[0].kind != "transfer"]
    first = [WorkStep(_sum(loads, 1), max(alone(work) for work in loads))] if loads and not primed else []
    left = times if primed else times - 1
    others = _sum(loads, left) if left else []
    products = _sum(rest, times)
    waits = max(map(alone, loads), default=0.0) > max(map(alone, rest), default=0.0)
    parts = [*others, *products] if waits else [*products, *others]
    return [*first, WorkStep(parts, left * round_ / stages)] if parts else first


def _round(works: list[WorkStep]) -> float:
    """Seconds of an iteration on an idle machine, whose loads are all in flight at once."""
    loads = [work for work in works if work.parts[0].kind == "transfer"]
    side_by_side = WorkStep(_sum(loads, 1), max((work.floor_s for work in loads), default=0.0))
    return alone(side_by_side) + sum(alone(work) for work in works if work.parts[0].kind != "transfer")


def _sum(works: list[WorkStep], times: int) -> list[WorkPart]:
    """The parts of steps, those of the same line as one, those of the longest step first."""
    groups: dict[Any, list[WorkPart]] = {}
    for work in sorted(works, key=alone, reverse=True):
        for part in work.parts:
            groups.setdefault((part.name, part.kind, part.where), []).append(part)
    return [
        WorkPart(
            name, kind, where,
            merged([part.demands for part in parts], times),
            sum(part.nbytes for part in parts) * times,
            sum(part.flops for part in parts) * times,
        )
        for (name, kind, where), parts in groups.items()
    ]  # fmt: skip


def scaled(parts: list[WorkPart], factor: float) -> list[WorkPart]:
    """Parts of which each is `factor` times as large."""
    return [
        WorkPart(p.name, p.kind, p.where, merged([p.demands], factor), p.nbytes * factor, p.flops * factor)
        for p in parts
    ]
