# SPDX-License-Identifier: MIT
"""What units that execute ask of the emulation that they are part of."""

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
    """Who writes down what tasks do, for the simulation of the time."""

    def launches(self, count: int, resident: int, group: int, where: Location | None, same: bool) -> None:
        """The current task starts a grid of so many programs."""

    def unites(self, tasks: Sequence[Task]) -> None:
        """The current task acts for all of a cluster's programs, until `divides`."""

    def divides(self) -> None:
        """It acts for itself again."""

    def rendezvous(self, frame: Actor, rendezvous: Any, rank: int, name: str, level: str, moves: Any) -> None:
        """The current task takes part in a collective of a level."""


class Emulation(Protocol):
    """The state that all frames share.

    Attributes:
        scheduler: runs the tasks.
        observers: are told of accesses; `listeners`, of what orders tasks: these and the recorder.
        recorder: None where nobody asks for the time.
        rendezvous: those that are open.
        missed: by tensor and line, the tile operations of which no element lay inside of the tensor.
        grids: those that run.
        extents, mesh: units of each launched level, and the grid where its programs own tensors.
    """

    scheduler: Scheduler
    observers: Sequence[Observer]
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
        """The current task leaves a barrier or rendezvous that was open to it."""

    def synchronizes(self, frame: Actor) -> None:
        """The threads of a frame synchronize, or may."""

    def number(self, unit: Unit) -> int:
        """The number of the tensor-owning unit that a unit is or lies in."""

    def queue_of(self, unit: Unit) -> Any:
        """The copy queue of a tensor-owning unit, whose task is the current one."""

    def moved(self, unit: Unit, peer: Unit, size: int, sent: bool) -> None:
        """A copy of `size` bytes to or from a peer."""

    def signalled(self, unit: Unit, level: str | None, flag: int) -> None:
        """A unit updated the flag at an address; `level` is that whose ranks it spoke of."""

    def signallers(self, flag: int, lines: list[Location | None]) -> str:
        """Who signalled the flag at an address so far, who of their siblings did not, and which lines would."""

    def collected(self, unit: Unit, name: str, level: str, size: int) -> None:
        """A unit took part in a collective of a level with `size` bytes."""

    def programs_ended(self, unit: Unit, count: int, collectives: Mapping[str, int]) -> None:
        """So many tile programs have ended, which took part in collectives that were not told yet."""
