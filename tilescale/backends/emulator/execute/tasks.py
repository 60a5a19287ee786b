# SPDX-License-Identifier: MIT
"""What the scheduler runs, and what that waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import greenlet

from tilescale.errors import Location


@dataclass
class Wait:
    """What a task waits for.

    Attributes:
        ready: whether it may go on.
        what: "flags[3] >= 1", "the barrier of level 'device'", ...
        seen: what is there instead, evaluated for a report.
        where: the line that waits.
        missing: who would have to act, evaluated for a report.
        quiet: waits of the emulator itself (a launch waiting for its programs), left out of reports.
        spins: whether it is a loop that looks again after every write of others.
        flag: of a wait for a flag, the buffer's home, the indices, and the unit that waits.
        patient: whether others go first, as far as they can, even if it may go on: so it sees all that may have come.
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
        name: which unit it is, e.g. "device 2, block (0, 1)".
        parent: who waits for its end.
        beside: the task of the unit that it works for, which does not wait for it.
        wait: what it waits for now.
        waited: whether it, or a task that it made, has come to a wait, be it for what was there already.
        paused: whether it has let others run first.
        ended: whether it has ended.
    """

    name: str
    body: Callable[[], None]
    done: Callable[[], None] | None = None
    parent: Task | None = None
    beside: Task | None = None
    wait: Wait | None = None
    waited: bool = False
    paused: bool = False
    ended: bool = False
    greenlet: greenlet = field(init=False)
