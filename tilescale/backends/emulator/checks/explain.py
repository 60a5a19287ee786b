# SPDX-License-Identifier: MIT
"""Text of a race report: tasks, lines, elements, the flags between the accesses, and what would order them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilescale.backends.emulator.checks.states import Access, State
from tilescale.backends.emulator.checks.text import Box, acting, declared_name, owner_of, region_text, same_memory
from tilescale.backends.emulator.execute.observe import ATOMIC_LOAD, READ, WRITE
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import RaceError

LATELY = 15
"""Signals and waits of a task that are kept for reports in addition to the last one."""

VERBS = {READ: "reads", WRITE: "writes", ATOMIC_LOAD: "atomically reads"}
"""Verbs of accesses other than updates."""


@dataclass(frozen=True)
class Mark:
    """A signal or a wait: the flag, the line, and the task's time."""

    home: Home
    flag: np.ndarray
    time: int

    @property
    def name(self) -> str:
        """The flag's name in the program."""
        return f"{self.home.name}[{', '.join(map(str, self.index))}]"

    @property
    def index(self) -> list[int]:
        """The flag's indices in its tensor."""
        owner = self.flag
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        first = owner.__array_interface__["data"][0]
        offset = (self.flag.__array_interface__["data"][0] - first) // owner.itemsize
        return [offset * owner.itemsize // s % n if s else 0 for s, n in zip(owner.strides, owner.shape, strict=True)]

    @property
    def place(self) -> int:
        """The flag's address."""
        return int(self.flag.__array_interface__["data"][0])

    @property
    def line(self) -> str:
        """Its line, in parentheses."""
        return f" (line {self.home.where.line})" if self.home.where else ""


@dataclass(frozen=True)
class Race:
    """Two racing accesses, in the order in which they happened, and the earlier accesses to the elements."""

    first: Access
    second: Access
    past: State

    @property
    def reuse(self) -> tuple[Access, Access] | None:
        """The read and the write, if the write overwrites too early what the same task had written for the reader."""
        if self.second.kind == WRITE and self.first.kind == READ:
            read, write, before = self.first, self.second, self.past.write
        elif self.second.kind == READ and self.first.kind == WRITE:
            read, write, before = self.second, self.first, self.past.before
        else:
            return None
        known = before is not None and before.clock is write.clock and read.clock.knows(before.clock, before.time)
        return (read, write) if known and read.clock is not write.clock else None


def race_error(run: Run, race: Race, box: Box, owner: np.ndarray) -> RaceError:
    """The error for a race on a box of elements of some memory."""
    first, second = race.first, race.second
    region = region_text(declared_name(run, second.home), box)
    holder = owner_of(second.unit, first.home.root, owner)
    place = f" of {holder}" if holder is not None and holder.level else ""
    acts = f"{who(first)} {verb(first)} it and {who(second)} {verb(second)} it"
    lines = [f"{region}{place}: {acts}, with no happens-before between them"]
    lines += [f"  {line}" for line in _flags(first, second)]
    shared = same_memory(holder, first.home.root) if holder is not None else []
    if len(shared) > 1:
        lines.append(f"  {'; '.join(map(str, shared))} were given the same tensor")
    error = RaceError(
        "\n".join(lines),
        hint="pass a tensor of its own for each of them" if len(shared) > 1 else _remedy(run, race),
        where=[replace(a.home.where, what=f"{verb(a)} here") for a in (first, second) if a.home.where],
    )
    error.located = True
    return error


def who(access: Access) -> str:
    return acting(access.unit, access.clock.name)


def verb(access: Access) -> str:
    return VERBS.get(access.kind, "atomically updates")


def _flags(first: Access, second: Access) -> list[str]:
    """The flags signalled and waited for around the accesses: often a wrong flag, or one at the wrong time."""
    lines = []
    for access, other in ((first, second), (second, first)):
        signals = _signals_between(access, other) or access.clock.signals
        before = [m for m in signals if m.time < access.time]
        after = [m for m in signals if m.time >= access.time]
        if access.kind == READ and before and after and before[-1].name == after[0].name:
            lines.append(f"{who(access)} signals {after[0].name} before that{before[-1].line} and again{after[0].line}")
        elif after:
            lines.append(f"{who(access)} signals {after[0].name} after that{after[0].line}")
        elif before and access.kind != READ:
            lines.append(f"{who(access)} signals {before[-1].name} before that{before[-1].line}")
        for mark in (_shared(access.waits, other.clock.signals) or access.waits)[-1:]:
            lines.append(f"{who(access)} waited {'last ' * (mark is access.waits[-1])}for {mark.name}{mark.line}")
    return lines


def _signals_between(access: Access, other: Access) -> list[Mark]:
    """Signals of one task to the flag of the other's last wait for a flag of this task."""
    awaited = _shared(other.waits, access.clock.signals)
    return _shared(access.clock.signals, awaited[-1:])


def _shared(marks: Sequence[Mark], others: Sequence[Mark]) -> list[Mark]:
    """Marks of flags that `others` has as well."""
    flags = {other.place for other in others}
    return [mark for mark in marks if mark.place in flags]


def _line(access: Access) -> str:
    return f"line {access.home.where.line}" if access.home.where else verb(access)


def _remedy(run: Run, race: Race) -> str:
    first, second = race.first, race.second
    for queued, other in ((first, second), (second, first)):
        if run.is_queue(queued.clock.name):
            return _remedy_of_queue(queued, other)
    if race.reuse is not None:
        return _credit(run, *race.reuse)
    atomic = [a for a in (first, second) if a.kind not in (READ, WRITE)]
    level = apart(first.unit, second.unit)
    order = primitives(run, level)
    one, two = _line(first), _line(second)
    if one == two:
        text = f"order the accesses of {one}: {order}"
    elif {first.kind, second.kind} == {READ, WRITE} and first.kind == WRITE:
        text = f"{_early_signal(first, second)}between {one} and {two}: {order}"
    else:
        text = f"order {one} and {two}: {order}"
    if len(atomic) == 2 and first.width != second.width:
        return f"{text}; or use one type for both: atomics of different widths are not atomic with each other"
    if len(atomic) == 2:
        return f"{text}; or T.atomic_add(..., dst=rank) for both: without dst= it is atomic within one device"
    if len(atomic) == 1:
        return f"{text}; or make both atomic"
    adds = one == two or first.kind == second.kind == WRITE
    return f"{text}; or T.atomic_add, if they are to add up" if adds else text


def _early_signal(first: Access, second: Access) -> str:
    """A signal before the write, which therefore does not order the write before the reader's wait."""
    for write, read in ((first, second), (second, first)):
        signals = _signals_between(write, read)
        if (write.kind, read.kind) == (WRITE, READ) and signals and signals[-1].time < write.time:
            mark = signals[-1]
            return f"{mark.name} is signalled{mark.line} before {_line(write)} writes, and does not order that write; "
    return ""


def _credit(run: Run, read: Access, write: Access) -> str:
    """The remedy for a buffer reused too early: a credit from the reader, in addition to the existing signal."""
    level = apart(read.unit, write.unit)
    kind = None if level is None else run.machine.level(level).kind
    early = f"{_line(write)} reuses the buffer before {_line(read)} has finished with it"
    if kind in (None, "thread_group"):
        return f"{early}: {primitives(run, level)}; or use a buffer per iteration"
    answer = "T.signal(free[i], dst=peer)" if kind == "unit" else "T.signal(free[i])"
    return (
        f"{early}: return a credit, {answer} after {_line(read)} and T.wait(free[i], ...) before {_line(write)}; "
        "or T.barrier() after both; or use a buffer per iteration"
    )


def _remedy_of_queue(queued: Access, other: Access) -> str:
    """The remedy for a race with an asynchronous copy: only its flag says that it has completed."""
    if queued.kind == WRITE:
        return f"wait for the flag that {_line(queued)} signals before {_line(other)}"
    return (
        f"{_line(queued)} is asynchronous and reads later: do {_line(other)} before it, or after a credit from the "
        "receiver, T.signal once its wait for the flag has returned"
    )


def apart(one: Unit, other: Unit) -> str | None:
    """The coarsest level at which two units differ; None for parts of one unit."""
    for (level, rank), (_, other_rank) in zip(one.path(), other.path(), strict=False):
        if rank != other_rank:
            return level
    longer = max(one.path(), other.path(), key=len)
    shorter = min(len(one.path()), len(other.path()))
    return longer[shorter][0] if len(longer) > shorter else None


def primitives(run: Run, name: str | None) -> str:
    """The synchronization primitives for units of a level."""
    arrival = "T.barrier_arrive(b) after the one and T.barrier_wait(b) before the other"
    if name is None:
        return f"T.sync_threads() that both reach, or {arrival}"
    barrier = f'T.barrier() in T.Scale("{name}")'
    kind = run.machine.level(name).kind
    if kind == "thread_group":
        return f"{barrier}, or {arrival}"
    wait = "after the one and T.wait(flag[i], ...) before the other"
    if kind == "unit":
        return f"T.signal(flag[i], dst=peer), or signal=flag[i] on its T.copy, {wait}; or {barrier}"
    apart = f'a grid phase for each, by T.barrier() in T.Scale("{run.machine.tensor_level.name}") between them'
    return f"T.signal(flag[i]) {wait}, {barrier}, or {apart}"
