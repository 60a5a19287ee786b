# SPDX-License-Identifier: MIT
"""What an emulation tells those who watch it: the checks, the recorder.

Events come in the order in which they happen. Who acts is the scheduler's current task; a frame says for which unit.
Orders between tasks have three sources: a task makes others and waits for their end (`begins`, `joins`), barriers and
rendezvous (`publishes`, `acquires`), and flags (`signals`, `waited`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location

READ, WRITE, ATOMIC, ATOMIC_STORE = "read", "write", "atomic", "atomic store"
ATOMIC_LOAD, DEVICE_ATOMIC = "atomic load", "device atomic"
"""Kinds of access. A tile that is updated in place is read and written; flags are accessed by atomics. An atomic store
does not look at what was there before, an atomic load leaves it. A device atomic is atomic among the threads of one
device, no further."""

READS = (READ, ATOMIC_LOAD)
"""Those that change nothing."""


class Actor(Protocol):
    """Who acts: what observers see of a frame."""

    unit: Unit
    space: tuple[int, ...]
    mask: np.ndarray | None


class Access(Protocol):
    """A buffer and the line of an access to it.

    Attributes:
        name: the buffer's.
        slot, root: numbers of the buffer, and of the tile or tensor behind it if it is a view.
        private: whether every thread has its own.
        shared: whether other threads can reach it.
        guarded: whether it lies in device memory, where accesses outside of it are cut off.
        replicated: the tile that a write changes, if units may hold replicas of that.
    """

    name: str
    slot: int
    root: int
    private: bool
    shared: bool
    guarded: bool
    replicated: int | None
    where: Location | None


class Observer:
    """Someone who watches a run. Every method does nothing here."""

    def starts(self, run: Any) -> None:
        """The run is ready to be launched; its program is compiled."""

    def looks_at(self, home: Access) -> bool:
        """Whether it wants to be told of accesses to a buffer. Asked once for each place in the program."""
        return True

    def ends(self) -> None:
        """All tasks have ended as they should."""

    def begins(self, task: Task) -> None:
        """A task was made, by `task.parent` or, where that is None, by the launch."""

    def joins(self, ended: Sequence[Task]) -> None:
        """The current task goes on: all tasks that it had made and waited for have ended."""

    def accesses(self, frame: Actor, home: Access, kind: str, array: np.ndarray, index: Any) -> None:
        """A unit reads or writes the elements `array[index]` of a buffer that more than one thread can reach.

        Args:
            home: the buffer, and the line of the access.
            kind: READ, WRITE, or one of the atomic ones.
            array: the instance that is accessed, or a view of it.
            index: all that numpy takes as an index; `()` for the whole.
        """

    def accesses_private(self, frame: Actor, home: Access, kind: str, buffer: Any, index: tuple) -> None:
        """The active threads read or write an element each of a thread-private buffer."""

    def copies(self, source: np.ndarray, target: np.ndarray) -> None:
        """The emulator itself makes `target` a copy of `source`: a unit's replica of a tile, or the way back."""

    def publishes(self, place: Hashable) -> None:
        """The current task arrives at a place where others will see what it has done."""

    def acquires(self, place: Hashable) -> None:
        """The current task leaves a place, and sees all that was published there until now."""

    def synchronizes(self, frame: Actor) -> None:
        """The threads of a frame, which run in step, come to a barrier of theirs, or to what may contain one."""

    def passes(self, frame: Actor, barrier: Any, phase: int, where: Location | None) -> None:
        """A unit goes on after a wait for a parity, at which `(barrier, phase)` was open to it.

        A wait tells phases of one parity not apart: what it must have seen may be the end of an earlier one.
        """
        self.acquires((barrier, phase))

    def completes(self, barrier: Any, phase: int, where: Location | None) -> None:
        """The last arrival at a phase of a barrier."""

    def signals(self, frame: Actor, home: Access, flag: np.ndarray, op: str, before: int) -> None:
        """A unit has updated a flag, an array of one element, by "add" or "set"; what it did before is published.

        `before` is the value that the flag had.
        """

    def waited(self, frame: Actor, home: Access, flag: np.ndarray, holds: Callable[[Any], bool]) -> None:
        """A unit has seen that `holds` is true of a flag's value, and sees what was published with that value."""

    def orders(self, frame: Actor, array: np.ndarray, index: Any, op: str, order: str) -> None:
        """A unit has accessed the elements `array[index]` by stock atomics.

        Args:
            array, index: as for `accesses`.
            op: "load", "store", or the update: "add", "max", ...
            order: the memory order of C++: "relaxed", "consume", "acquire", "release", "acq_rel" or "seq_cst".
        """
