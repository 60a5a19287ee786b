# SPDX-License-Identifier: MIT
"""The interface of the emulation to the units that it executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from tilescale.backends.emulator.execute.observe import Actor, Observer
from tilescale.backends.emulator.execute.scheduler import Scheduler
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location


class Recorder(Protocol):
    """Records what tasks do, for the simulation of time."""

    def launches(self, count: int, resident: int, group: int, where: Location | None, same: bool) -> None:
        """The current task starts a grid of `count` programs."""

    def unites(self, tasks: Sequence[Task]) -> None:
        """The current task acts for all of a cluster's programs, until `divides`."""

    def divides(self) -> None:
        """The current task acts for itself again."""

    def rendezvous(self, frame: Actor, rendezvous: Any, rank: int, name: str, level: str, moves: Any) -> None:
        """The current task takes part in a collective of a level."""


class Emulation(Protocol):
    """The state that all frames share.

    Attributes:
        scheduler: runs the tasks.
        observers: see accesses; `listeners` see what orders tasks: the observers and the recorder.
        watching: observers of accesses by one statement to one buffer.
        recorder: None where the run is not timed.
        rendezvous: the open ones.
        missed: by tensor and line, the tile operations that were wholly out of bounds.
        grids: the running ones.
        extents, mesh: units of each launched level, and the grid where its programs own tensors.
    """

    scheduler: Scheduler
    observers: Sequence[Observer]
    watching: dict[Any, Sequence[Observer]]
    listeners: Sequence[Observer]
    recorder: Recorder | None
    rendezvous: dict[Hashable, Any]
    missed: Counter[tuple[str, Location | None]]
    grids: list[Any]
    extents: Mapping[str, int]
    mesh: tuple[int, ...]

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
        """The units that have signalled the flag at an address, their siblings that have not, and the lines that would.
        """

    def collected(self, unit: Unit, name: str, level: str, size: int) -> None:
        """A unit took part in a collective of a level with `size` bytes."""

    def programs_ended(self, unit: Unit, count: int, collectives: Mapping[str, int]) -> None:
        """`count` tile programs have ended; `collectives` are those they took part in and have not reported yet."""
