# SPDX-License-Identifier: MIT
"""The steps of a program, task by task and without times: the input of a simulation.

A task is a thread of control: a device's phases, a program, one role of it. Its steps follow one another. A step's
demand of a resource is given in seconds of that resource working for it alone.

Steps name relative to their task what belongs to its unit: resources, and the places where the unit's tasks
synchronize. So units and programs that do the same have equal steps, or share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilescale.errors import Location

Demands = Mapping[Hashable, float]
"""Resource -> seconds of it. A text names a resource of the place where the task runs, such as its tensor unit, an
`UnitResource` one of a tensor-owning unit, such as its memory; a `SharedLink` is a link."""


class UnitResource(NamedTuple):
    """A resource that each tensor-owning unit has once: memory, a cache, a copy engine. `row` None: the task's unit."""

    row: int | None
    name: str

Place = Hashable
"""A synchronization place. A number belongs to the scope of the task that names it: the program, if its launch is
`alike`, else the tensor-owning unit. Any other value names the same place for all tasks."""


@dataclass(slots=True)
class WorkPart:
    """One operation of a step, or many of the same line; see `Span` for the fields."""

    name: str
    kind: str
    where: Location | None
    demands: Demands
    nbytes: float = 0
    flops: float = 0


@dataclass(slots=True)
class WorkStep:
    """A step that takes time: all demands of all parts are met concurrently.

    Attributes:
        parts: its parts; first the one that takes longest on an idle machine.
        floor_s: that it takes at least, however idle the machine is.
        tail_s: after its end, until others can see its effect.
        ahead: None: the task continues when it is done. Else the task continues at once, unless more than `ahead` of
            its works are still running.
    """

    parts: list[WorkPart]
    floor_s: float = 0.0
    tail_s: float = 0.0
    ahead: int | None = None


@dataclass(slots=True)
class SettleStep:
    """Continue when no more than `left` of the task's works run ahead of it."""

    left: int = 0


@dataclass(slots=True)
class PublishStep:
    """Publish at a place, visible after the effects of earlier works.

    Attributes:
        place: where.
        change: the new value of the place, None where only the count of publications matters.
        delay_s: until they can see it.
    """

    place: Place
    change: Callable[[Any], Any] | None = None
    delay_s: float = 0.0
    name: str = "signal"
    where: Location | None = None


@dataclass(slots=True)
class AcquireStep:
    """Wait for others at a place: until its value fits or it was published there `count` times.

    The count is that of the run that was recorded, in which the wait had ended; it matters where the simulated order of
    publications is another one and the value passes by.

    Attributes:
        delay_s: least time from when its condition holds to its end.
        lag_s: least time from the last publication to its end.
        idle: whether the task is idle until then, so that the wait does not count.
    """

    place: Place
    count: int
    name: str
    where: Location | None
    holds: Callable[[Any], bool] | None = None
    delay_s: float = 0.0
    lag_s: float = 0.0
    idle: bool = False


@dataclass(slots=True)
class RendezvousStep:
    """A collective operation of `size` tasks: it begins when all have arrived, and they continue when it has ended.

    Attributes:
        place: its identity.
        rank: of this task among them.
        work: makes the step for all, given the rows of the tasks in the order of ranks; called once.
    """

    place: Place
    size: int
    rank: int = field(compare=False)
    name: str
    where: Location | None
    work: Callable[[tuple[int, ...]], WorkStep] = field(compare=False)


@dataclass(slots=True)
class RecordedTask:
    """One thread of control.

    Attributes:
        unit: its readable name inside the task that started it, "" if it acts for the same unit.
        row: number of the tensor-owning unit that it belongs to. A program may be recorded for several: then it counts
            where it was launched.
        steps: in order.
        engine: what its spans are shown on, if it is an engine separate from the unit's instructions.
    """

    unit: str
    row: int = field(compare=False)
    steps: list[Any] = field(default_factory=list)
    engine: str = ""


@dataclass(slots=True)
class ForkStep:
    """Concurrent subtasks of this task, which continues when all have ended."""

    tasks: list[RecordedTask] = field(default_factory=list)


@dataclass(slots=True)
class LaunchStep:
    """Programs over the places of a tensor-owning unit, in order, as many at a time as they hold.

    Attributes:
        places: how many program units there are.
        each: programs that each of them holds.
        group: programs that start together.
        seconds: until the first starts.
        alike: whether programs may share their steps: each is a separate scope.
        tasks: all programs, in launch order.
    """

    places: int
    each: int
    group: int
    seconds: float
    name: str
    where: Location | None
    alike: bool = False
    tasks: list[RecordedTask] = field(default_factory=list)


Step = WorkStep | SettleStep | PublishStep | AcquireStep | RendezvousStep | ForkStep | LaunchStep


def merged(demands: Sequence[Mapping[Any, float]], factor: float = 1.0) -> dict[Hashable, float]:
    """All demands together, each `factor` times."""
    total: dict[Hashable, float] = {}
    for each in demands:
        for resource, seconds in each.items():
            total[resource] = total.get(resource, 0.0) + seconds * factor
    return total
