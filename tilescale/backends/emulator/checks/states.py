# SPDX-License-Identifier: MIT
"""The last accesses to one element, and which of them a new access must happen after.

As in FastTrack: the last plain write, and the reads and atomics since. An access that happened before a later one of
its kind is dropped: a new access that races with it races with the later one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilescale.backends.emulator.checks.clocks import Clock
from tilescale.backends.emulator.execute.observe import ATOMIC_LOAD, DEVICE_ATOMIC, READ, READS, WRITE
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home


@dataclass(frozen=True, eq=False)
class Access:
    """Accesses of one statement by one task in one epoch.

    Attributes:
        clock, time: the epoch.
        kind: READ, WRITE, or a kind of atomic access.
        home: buffer and line.
        unit: the unit of the program that made the access.
        waits: the flags that the task waited for, the last one last.
        device: the number of the device that the unit belongs to.
        width: of the type of the element, in bytes.
        mixed: whether atomics on the element may be of one device alone and of others, or of several widths.
    """

    clock: Clock
    time: int
    kind: str
    home: Home
    unit: Unit
    waits: tuple[Any, ...] = ()
    device: int = 0
    width: int = 0
    mixed: bool = False

    def is_atomic_with(self, other: Access) -> bool:
        """Whether two atomic accesses are atomic with respect to each other."""
        in_scope = self.device == other.device or DEVICE_ATOMIC not in (self.kind, other.kind)
        return in_scope and self.width == other.width


MOST = 1 << 16
"""Number of states from which on those without elements are dropped."""

Chain = tuple[Access, Any] | None
"""A linked list of accesses, the last one first: (access, earlier ones)."""


@dataclass(frozen=True, eq=False)
class State:
    """The accesses to an element that a later one may race with; for reports also the write `before` the last one.

    The first of several accesses by one task is kept. `loads` are the atomic ones.
    """

    write: Access | None = None
    reads: Chain = None
    atomics: Chain = None
    loads: Chain = None
    before: Access | None = None

    def conflict(self, access: Access) -> Access | None:
        """An access that races with a new one."""
        clock = access.clock
        if self.write is not None and not clock.knows(self.write.clock, self.write.time):
            return self.write
        for chain in self._others(access.kind):
            for other in _members(chain):
                if not clock.knows(other.clock, other.time):
                    return other
        for chain in self._atomic_too(access):
            for other in _members(chain):
                if not access.is_atomic_with(other) and not clock.knows(other.clock, other.time):
                    return other
        return None

    def accesses(self) -> Iterator[Access]:
        """All kept accesses, except the write before the last one."""
        if self.write is not None:
            yield self.write
        yield from _members(self.reads)
        yield from _members(self.atomics)
        yield from _members(self.loads)

    def _others(self, kind: str) -> tuple[Chain, ...]:
        """The accesses that a new one of that kind must always be ordered after."""
        if kind in READS:
            return (self.atomics,) if kind == READ else ()
        return (self.reads, self.atomics, self.loads) if kind == WRITE else (self.reads,)

    def _atomic_too(self, access: Access) -> tuple[Chain, ...]:
        if not access.mixed:
            return ()
        return (self.atomics,) if access.kind == ATOMIC_LOAD else (self.atomics, self.loads)

    def after(self, access: Access) -> State:
        """The state after a new access that races with none."""
        if access.kind == WRITE:
            first = self.before if self.before is not None and self.before.clock is access.clock else self.write
            return State(access, before=first)
        if access.kind == READ:
            return replace(self, reads=_added(access, self.reads))
        if access.kind == ATOMIC_LOAD:
            return replace(self, loads=_added(access, self.loads))
        return replace(self, atomics=_added(access, self.atomics))


def _members(chain: Chain) -> Iterator[Access]:
    while chain is not None:
        yield chain[0]
        chain = chain[1]


def _added(access: Access, chain: Chain) -> Chain:
    while chain is not None and access.clock.knows(chain[0].clock, chain[0].time):
        chain = chain[1]
    return access, chain


class Table:
    """Numbers of states, so that an integer array has the state of every element. 0 is untouched memory."""

    def __init__(self, ordered: Callable[[State, Access], None] = lambda state, access: None) -> None:
        """`ordered` is called with each state and a new access that is ordered after it."""
        self._ordered = ordered
        self._states = [State()]
        self._free: list[int] = []
        self._next: dict[tuple[int, Access], int] = {}
        self.limit = MOST

    def __getitem__(self, number: int) -> State:
        return self._states[number]

    @property
    def full(self) -> bool:
        """Whether states without elements should be dropped now."""
        return len(self._states) - len(self._free) > self.limit

    def after(self, number: int, access: Access) -> int:
        """The number of a state's successor. Raises Conflict: the access races with one of the state."""
        found = self._next.get((number, access))
        if found is not None:
            return found
        state = self._states[number]
        other = state.conflict(access)
        if other is not None:
            raise Conflict(number, other)
        self._ordered(state, access)
        following = state.after(access)
        if self._free:
            found = self._free.pop()
            self._states[found] = following
        else:
            found = len(self._states)
            self._states.append(following)
        self._next[number, access] = self._next[found, access] = found
        return found

    def keep(self, arrays: Iterator[np.ndarray]) -> None:
        """Forget all states but those in `arrays`."""
        used = np.zeros(len(self._states), bool)
        used[0] = True
        for array in arrays:
            used[array] = True
        self._free = np.flatnonzero(~used).tolist()
        for number in self._free:
            self._states[number] = State()
        self._next.clear()
        self.limit = max(self.limit, 2 * int(used.sum()))


class Conflict(Exception):
    """An access races with `other`, in all elements in the state of that number."""

    def __init__(self, number: int, other: Access):
        self.number, self.other = number, other
