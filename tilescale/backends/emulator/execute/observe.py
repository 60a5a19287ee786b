# SPDX-License-Identifier: MIT
"""The events of an emulation that observers see: the checks and the recorder.

Events come in the order in which they happen. The actor is the scheduler's current task; a frame has its unit. Orders
between tasks have three sources: a task makes others and waits for their end (`begins`, `joins`), barriers and
rendezvous (`publishes`, `acquires`), and flags (`signals`, `waited`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location

READ, WRITE, ATOMIC, ATOMIC_STORE = "read", "write", "atomic", "atomic store"
ATOMIC_LOAD, DEVICE_ATOMIC = "atomic load", "device atomic"
"""Kinds of access. A tile that is updated in place is read and written; flags are accessed by atomics. An atomic store
ignores the old value, an atomic load keeps it. A device atomic is atomic among the threads of one device only."""

READS = (READ, ATOMIC_LOAD)
"""Kinds that change nothing."""


class Actor(Protocol):
    """The actor of an event: the part of a frame that observers see."""

    unit: Unit
    space: tuple[int, ...]
    mask: np.ndarray | None


class Access(Protocol):
    """A buffer and the line of an access to it.

    Attributes:
        name: the buffer's.
        slot, root: numbers of the buffer, and of the tile or tensor behind it if it is a view.
        private: whether it is thread-private.
        shared: whether other threads can reach it.
        guarded: whether it lies in device memory, where accesses are clipped to its bounds.
        replicated: the tile that a write changes, if units may hold replicas of the tile.
    """

    name: str
    slot: int
    root: int
    private: bool
    shared: bool
    guarded: bool
    replicated: int | None
    where: Location | None


ActorT = TypeVar("ActorT", bound=Actor)
AccessT = TypeVar("AccessT", bound=Access)


class Observer(Generic[ActorT, AccessT]):
    """Base of observers of a run: every method does nothing. Observers name the actors and accesses that they see."""

    def starts(self, run: Any) -> None:
        """The run is ready to be launched; its program is compiled."""

    def looks_at(self, home: AccessT) -> bool:
        """Whether accesses to a buffer should be reported. Asked once for each access in the program."""
        return True

    def ends(self) -> None:
        """All tasks have ended without an error."""

    def begins(self, task: Task) -> None:
        """A task was made, by `task.parent`, or by the launch if there is no parent."""

    def joins(self, ended: Sequence[Task]) -> None:
        """The current task continues: all tasks that it had made and waited for have ended."""

    def accesses(self, frame: ActorT, home: AccessT, kind: str, array: np.ndarray, index: Any) -> None:
        """A unit reads or writes the elements `array[index]` of a buffer that more than one thread can reach.

        Args:
            home: the buffer, and the line of the access.
            kind: READ, WRITE, or one of the atomic ones.
            array: the instance that is accessed, or a view of it.
            index: any numpy index; `()` for the whole.
        """

    def iterates(self, frame: ActorT) -> None:
        """A unit begins to execute a nest of parallel loops."""

    def stored(self, frame: ActorT, home: AccessT, array: Any, index: tuple, values: np.ndarray) -> None:
        """Threads, or iterations of parallel loops, have stored a value each to `array[index]`, as the unit sees it."""

    def accesses_private(self, frame: ActorT, home: AccessT, kind: str, buffer: Any, index: tuple) -> None:
        """The active threads read or write an element each of a thread-private buffer."""

    def copies(self, source: np.ndarray, target: np.ndarray) -> None:
        """The emulator itself makes `target` a copy of `source`: a unit's replica of a tile, or the copy back."""

    def publishes(self, place: Hashable) -> None:
        """The current task releases what it has done to those that acquire `place`."""

    def acquires(self, place: Hashable) -> None:
        """The current task acquires all that was published at `place` until now."""

    def synchronizes(self, frame: ActorT) -> None:
        """A frame's threads, which run in lockstep, arrive at a barrier, or at a statement that may contain one."""

    def passes(self, frame: ActorT, barrier: Any, phase: int, where: Location | None) -> None:
        """A unit continues after a wait for a parity that `(barrier, phase)` satisfied.

        Phases of the same parity look the same to a wait: the phase it has seen may be an earlier one.
        """
        self.acquires((barrier, phase))

    def completes(self, barrier: Any, phase: int, where: Location | None) -> None:
        """The last arrival at a phase of a barrier."""

    def signals(self, frame: ActorT, home: AccessT, flag: np.ndarray, op: str, before: int) -> None:
        """A unit has updated a flag, an array of one element, by "add" or "set"; what it did before is published.

        `before` is the value that the flag had.
        """

    def waited(self, frame: ActorT, home: AccessT, flag: np.ndarray, holds: Callable[[Any], bool]) -> None:
        """A unit has seen that `holds` is true of a flag's value, and acquires what was published with the value."""

    def orders(self, frame: ActorT, array: np.ndarray, index: Any, op: str, order: str) -> None:
        """A unit has accessed the elements `array[index]` by stock atomics.

        Args:
            array, index: as for `accesses`.
            op: "load", "store", or the update: "add", "max", ...
            order: the memory order of C++: "relaxed", "consume", "acquire", "release", "acq_rel" or "seq_cst".
        """
