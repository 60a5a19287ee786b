# SPDX-License-Identifier: MIT
"""Parameters of a generated kernel, in order: the caller's tensors, and hidden ones of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.errors import Location
from tilescale.program.model import Program


@dataclass(frozen=True)
class CallerArgument:
    """A parameter of the program as the caller passes it: a tensor on this device, or a scalar."""

    position: int


@dataclass(frozen=True)
class PeerInstances:
    """A parameter on all devices: its instances with one more leading dimension, the slot of the device."""

    position: int


@dataclass(frozen=True)
class KernelWorkspace:
    """Memory that the runtime owns for one kernel, initially zero.

    Attributes:
        name: unique within the program; kernels that name the same workspace share it.
        shape, dtype: of one device's instance; extents may be expressions known in a call.
        symmetric: whether peers write it.
        peers: whether the kernel gets all devices' instances, like `PeerInstances`.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: str
    symmetric: bool = True
    peers: bool = False

    @property
    def is_of_program(self) -> bool:
        """Whether a program allocates it; the name of a phase's internal workspace has the phase's number."""
        return "@" not in self.name

    @classmethod
    def of(cls, buffer: ir.Buffer, program: Program, *, peers: bool = False) -> KernelWorkspace:
        """The program's allocation in device memory, which all its phases share; or one that lowering adds to a launch,
        under a name of its own."""
        shape = tuple(map(ir.plain, buffer.shape))
        return cls(program.workspace_names.get(buffer.data, buffer.name), shape, str(buffer.dtype), peers=peers)


@dataclass(frozen=True)
class DeviceRank:
    """This device's rank at a level."""

    level: str


@dataclass(frozen=True)
class SlotShift:
    """The number added to a peer's, modulo the number of devices, to get its slot in the heap's address range."""


@dataclass(frozen=True)
class WaitLimit:
    """Limit of a wait, in nanoseconds."""


@dataclass(frozen=True)
class WaitRecord:
    """The record in which the first wait that times out reports itself."""


@dataclass(frozen=True)
class RendezvousWords:
    """The words of the ranks' barrier, on all devices: each rank's last barrier, then the number of its blocks that
    have left."""


@dataclass(frozen=True)
class RendezvousCounts:
    """Counts of this device: barriers, blocks that had left, and those of the running kernel that have ended."""


@dataclass(frozen=True)
class BarrierPurpose:
    """The purpose of a rank's barrier at a place; `checked`: including the facts that all ranks must agree on."""

    site: int
    checked: bool = False


@dataclass(frozen=True)
class HostVariable:
    """The variable of a loop around phases."""

    var: ir.Var


Argument = (
    HostVariable
    | CallerArgument
    | PeerInstances
    | KernelWorkspace
    | DeviceRank
    | SlotShift
    | WaitLimit
    | WaitRecord
    | RendezvousWords
    | RendezvousCounts
    | BarrierPurpose
)


@dataclass(frozen=True)
class WaitSite:
    """A wait or signal, to decode a report of the device.

    Attributes:
        what: the operation, for messages.
        flag, compare: the tensor of flags and the comparison, for a wait on a flag.
        queued: whether the copy queue waits, not a block.
    """

    what: str
    where: Location | None
    flag: str = ""
    compare: str = ""
    queued: bool = False


@dataclass(frozen=True)
class KernelParameters:
    """The parameters of one kernel.

    Attributes:
        parameters, arguments: TIR's parameters, and the runtime's arguments for them.
        sites: the waits and signals, by number.
        reached: positions of the program's parameters that represent the peers' (`Signature.symmetric`).
        libraries: names of the device libraries that it calls.
        ahead: names of the tensors that a producer loads ahead of the consumers' waits.
        free: names of the tensors that a producer loads ahead of its own waits, too.
    """

    parameters: tuple[tuple[ir.Var, ir.Buffer | None], ...]
    arguments: tuple[Argument, ...]
    sites: tuple[WaitSite, ...]
    reached: frozenset[int]
    libraries: frozenset[str]
    ahead: frozenset[str]
    free: frozenset[str]
