# SPDX-License-Identifier: MIT
"""What a generated kernel takes, in order: the caller's tensors, and what the runtime adds unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.errors import Location


@dataclass(frozen=True)
class Given:
    """A parameter of the program as the caller passes it: a tensor on this device, or a scalar."""

    position: int


@dataclass(frozen=True)
class Peers:
    """A parameter on all devices: its instances with one more leading dimension, the slot of the device."""

    position: int


@dataclass(frozen=True)
class Workspace:
    """Memory that the runtime owns for one kernel, zero at first.

    Attributes:
        name: unique within the program; kernels that name the same workspace share it.
        shape, dtype: of one device's instance; extents may be expressions of what the call knows.
        symmetric: whether peers write it.
        peers: whether the kernel gets all devices' instances, like `Peers`.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: str
    symmetric: bool = True
    peers: bool = False

    @property
    def is_of_program(self) -> bool:
        """Whether a program allocates it; what a phase makes for itself has its number in the name."""
        return "@" not in self.name

    @classmethod
    def of(cls, buffer: ir.Buffer, *, peers: bool = False) -> Workspace:
        """What a program allocates in device memory; all its phases share it."""
        shape = tuple(n if ir.constant(n) is None else ir.constant(n) for n in buffer.shape)
        return cls(buffer.name, shape, str(buffer.dtype), peers=peers)


@dataclass(frozen=True)
class Rank:
    """This device's rank at a level."""

    level: str


@dataclass(frozen=True)
class SlotShift:
    """What is added to a peer's number, modulo the number of devices, to get its slot in the heap's address range."""


@dataclass(frozen=True)
class Limit:
    """Nanoseconds that a wait may take."""


@dataclass(frozen=True)
class WaitRecord:
    """Where the first wait that runs out of time says which it was."""


@dataclass(frozen=True)
class RendezvousWords:
    """The words by which all ranks synchronize, on all devices: where each stands, then how many of its blocks have
    left."""


@dataclass(frozen=True)
class RendezvousCounts:
    """How often this device has synchronized, how many blocks had left before, and how many of the running kernel have
    ended."""


@dataclass(frozen=True)
class Purpose:
    """What a rank comes to the barrier at a place for; `checked`: with what must be the same on all ranks."""

    site: int
    checked: bool = False


@dataclass(frozen=True)
class HostVariable:
    """The variable of a loop around phases."""

    var: ir.Var


Argument = (
    HostVariable
    | Given
    | Peers
    | Workspace
    | Rank
    | SlotShift
    | Limit
    | WaitRecord
    | RendezvousWords
    | RendezvousCounts
    | Purpose
)


@dataclass(frozen=True)
class Site:
    """A place that waits or signals: what a report of the device means.

    Attributes:
        what: the operation, for people.
        flag, compare: the tensor of flags and the comparison, for a wait on a flag.
        queued: whether it is the copy queue that waits, not a block.
    """

    what: str
    where: Location | None
    flag: str = ""
    compare: str = ""
    queued: bool = False


@dataclass(frozen=True)
class Parameters:
    """What one kernel takes.

    Attributes:
        parameters, arguments: TIR's parameters, and what the runtime passes for them.
        sites: the places that wait or signal, by number.
        reached: positions of the program's parameters that stand for those of peers (`Signature.symmetric`).
        libraries: names of the device libraries that it calls.
        ahead: names of the tensors that a producer loads ahead of what the other threads wait for.
        free: names of those that the threads that load do so ahead of what they wait for themselves, too.
    """

    parameters: tuple[tuple[ir.Var, ir.Buffer | None], ...]
    arguments: tuple[Argument, ...]
    sites: tuple[Site, ...]
    reached: frozenset[int]
    libraries: frozenset[str]
    ahead: frozenset[str]
    free: frozenset[str]
