# SPDX-License-Identifier: MIT
"""The interface of the emulation to the units that it executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tilescale.backends.emulator.execute.observe import Actor, Observer
from tilescale.backends.emulator.execute.scheduler import Scheduler
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location
from tilescale.hda import Machine


class Recorder(Protocol):
    """Records what tasks do, for the simulation of time."""

    def launches(self, count: int, resident: int, group: int, where: Location | None, same: bool) -> None:
        """The current task starts a grid of `count` programs."""

    def unites(self, tasks: Sequence[Task]) -> None:
        """The current task acts for all of a cluster's programs, until `divides`."""

    def divides(self) -> None:
        """The current task acts for itself again."""

    def rendezvous(self, call: Any, rank: int, name: str, level: str, moves: Any, on_tiles: bool) -> None:
        """The current task takes part in a collective of a level, `on_tiles` of a program."""


class Emulation(Protocol):
    """The state that all frames share.

    Attributes:
        scheduler: runs the tasks.
        observers: see accesses; `listeners` see what orders tasks: the observers and the recorder.
        watching: observers of accesses by one statement to one buffer.
        recorder: None where the run is not timed.
        rendezvous: the open ones.
        missed: by tensor and line, the accesses that were wholly out of bounds; `clipped`, those that were partly;
            `negative`, those with an index below zero.
        stale: by names of tensor and element, flags that were nonzero at the start.
        grids: the running ones.
        extents, mesh: units of each launched level, and the grid where its programs own tensors.
    """

    machine: Machine
    scheduler: Scheduler
    watching: dict[Any, Sequence[Observer]]
    rendezvous: dict[Hashable, Any]
    missed: Counter[tuple[str, Location | None]]
    clipped: Counter[tuple[str, Location | None]]
    negative: Counter[tuple[str, Location | None]]
    stale: dict[tuple[str, str], int]
    grids: list[Any]
    mesh: tuple[int, ...]

    @property
    def observers(self) -> Sequence[Observer]: ...

    @property
    def listeners(self) -> Sequence[Observer]: ...

    @property
    def recorder(self) -> Recorder | None: ...

    @property
    def extents(self) -> Mapping[str, int]: ...

    def publishes(self, place: Hashable) -> None:
        """The current task arrives at a barrier or rendezvous."""

    def acquires(self, place: Hashable) -> None:
        """The current task leaves a completed barrier or rendezvous."""

    def synchronizes(self, frame: Actor) -> None:
        """The threads of a frame synchronize, or may."""

    def number(self, unit: Unit) -> int:
        """The number of the tensor-owning unit that contains `unit`."""

    def queue_of(self, unit: Unit) -> Any:
        """The copy queue of a tensor-owning unit, whose task is the current one."""

    def moved(self, unit: Unit, peer: Unit, size: int, sent: bool) -> None:
        """A copy of `size` bytes to or from a peer."""

    def signalled(self, unit: Unit, level: str | None, flag: int) -> None:
        """A unit updated the flag at an address; `level` is the level of the `dst` rank."""

    def signallers(self, flag: int, lines: list[Location | None]) -> str:
        """The units that have signalled the flag at an address, siblings that have not, and the lines that would."""

    def flag_at_begin(self, flag: np.ndarray, now: int) -> int:
        """The value of a flag at its first signal or wait; `now` is its current value."""

    def exchanged(self, unit: Unit, made: int, size: int) -> None:
        """Programs of a unit exchange tiles by the collective number `made`, through `size` bytes of memory."""

    def collected(self, unit: Unit, name: str, level: str, size: int, algorithm: str) -> None:
        """A unit took part in a collective of a level with `size` bytes."""

    def collectives_of(self, unit: Unit) -> Counter[str]:
        """The collectives that a unit and its programs took part in, and how often."""

    def programs_ended(self, unit: Unit, count: int, collectives: Mapping[str, int]) -> None:
        """`count` tile programs have ended; `collectives` are those they took part in and have not reported yet."""
