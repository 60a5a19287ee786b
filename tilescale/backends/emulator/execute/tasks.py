# SPDX-License-Identifier: MIT
"""Tasks of the scheduler, and their waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import greenlet

from tilescale.errors import Location


@dataclass
class Wait:
    """The wait of a task.

    Attributes:
        ready: whether the task may continue.
        what: "flags[3] >= 1", "the barrier of level 'device'", ...
        seen: the present value, evaluated for a report.
        where: the line that waits.
        missing: the units that would have to act, evaluated for a report.
        quiet: waits of the emulator itself (a launch waiting for its programs), left out of reports.
        spins: whether it is a polling loop, which runs again after every write of others.
        flag: of a wait for a flag, the buffer's home, the indices, and the unit that waits.
        patient: whether others run first, as far as they can, even if it is satisfied: so it sees all that may have
            arrived.
    """

    ready: Callable[[], bool]
    what: str
    seen: Callable[[], str] = str
    where: Location | None = None
    missing: Callable[[], str] = str
    quiet: bool = False
    spins: bool = False
    patient: bool = False
    flag: tuple[Any, tuple[int, ...], Any] | None = None


@dataclass(eq=False)
class Task:
    """One coroutine.

    Attributes:
        name: the unit's name, e.g. "device 2, block (0, 1)".
        parent: the task that waits for its end.
        started_by: the task of the unit that started it asynchronously, which does not wait for it.
        wait: its current wait.
        waited: whether it, or a task that it made, has reached a wait, even a satisfied one.
        paused: whether it has let others run first.
        ended: whether it has ended.
    """

    name: str
    body: Callable[[], None]
    done: Callable[[], None] | None = None
    parent: Task | None = None
    started_by: Task | None = None
    wait: Wait | None = None
    waited: bool = False
    paused: bool = False
    ended: bool = False
    greenlet: greenlet = field(init=False)
