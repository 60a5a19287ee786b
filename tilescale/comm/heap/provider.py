# SPDX-License-Identifier: MIT
"""Providers of a heap's memory: their interface, the list of them, and the choice of one."""

from __future__ import annotations

import importlib
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.group import HeapGroup
from tilescale.errors import RankMismatchError, TileScaleError, UnsupportedError, UsageError, picklable
from tilescale.hda.units import format_bytes

if TYPE_CHECKING:
    import torch


class Extent(NamedTuple):
    """A range of a heap that is mapped on all ranks: its offset in the heap and its size, in bytes."""

    offset: int
    nbytes: int


class HeapCannotGrow(Exception):
    """A heap cannot grow; every rank raises this with the same text. `hint` says how to make it possible."""

    def __init__(self, reason: str, hint: str):
        super().__init__(reason)
        self.hint = hint

    @classmethod
    def full(cls, capacity: int, room: int, least: int) -> HeapCannotGrow:
        """`least` more bytes are needed where only `room` of the capacity are left."""
        enough = -(-(capacity + least - room) >> 20)
        return cls(
            f"{format_bytes(room)} of its capacity of {format_bytes(capacity)} are left",
            f"set TILESCALE_HEAP_BYTES={enough}MiB or more, or pass capacity= to SymmetricHeap",
        )


class Provider(Protocol):
    """The memory of one heap on this rank, and the addresses under which it sees that of the others.

    Attributes:
        addresses: addresses of all ranks' heaps.
        capacity: to how many bytes on each rank it can grow.
        extents: the mapped ranges.
        freed_at_exit: the end of the process frees everything by itself, so exit handlers may read tensors until then.
    """

    addresses: AddressMap
    capacity: int
    extents: list[Extent]
    freed_at_exit: bool

    @classmethod
    def objection(cls, device: torch.device, hosts: int) -> TileScaleError | None:
        """Why this provider cannot serve ranks on `hosts` hosts with memory of `device`; None if it can."""
        ...

    @classmethod
    def suggest(cls, device: torch.device, ranks: int) -> int:
        """Default limit in bytes of a heap on each of `ranks` ranks."""
        ...

    @classmethod
    def open(cls, group: HeapGroup, device: torch.device, hosts: int, capacity: int, call: CollectiveCall) -> Provider:
        """Collective: a heap of ranks on `hosts` hosts that can grow to `capacity` bytes on each rank."""
        ...

    def grow(self, nbytes: int, tail: int, call: CollectiveCall) -> Extent:
        """Collective: map more memory, so that there are `nbytes` free bytes in one piece.

        `tail` bytes at the end of the last extent are free already. Raises Refused, on all ranks or on none.
        """
        ...

    def wait_idle(self) -> None:
        """Wait until the device has done all work that was given to it."""
        ...

    def close(self) -> None:
        """Give all memory back. Waits for no other rank without a bound."""
        ...


@dataclass(frozen=True)
class ProviderEntry:
    """A provider that can be chosen.

    Attributes:
        name: shown to users, and accepted by `TILESCALE_HEAP`.
        device_type: of the tensors that it serves, in PyTorch's words.
        home: "module:class"; loaded when the provider is considered.
    """

    name: str
    device_type: str
    home: str

    def load(self) -> type[Provider]:
        """The provider's class."""
        module, name = self.home.split(":")
        return getattr(importlib.import_module(module), name)


PROVIDERS: dict[str, ProviderEntry] = {}
"""All providers by name, best first."""


def register(entry: ProviderEntry) -> None:
    """Add a provider. Raises UsageError if the name is taken."""
    if entry.name in PROVIDERS:
        raise UsageError(f"a heap provider named {entry.name!r} exists", hint="choose another name")
    PROVIDERS[entry.name] = entry


register(ProviderEntry("cuda_vmm", "cuda", "tilescale.comm.heap.cuda_vmm:CudaVmm"))
register(ProviderEntry("nvshmem", "cuda", "tilescale.comm.heap.nvshmem:Nvshmem"))
register(ProviderEntry("host", "cpu", "tilescale.comm.heap.host:HostProvider"))


def choose(
    group: HeapGroup, device: torch.device, wanted: str | None, call: CollectiveCall
) -> tuple[ProviderEntry, int]:
    """Collective: the first provider that no rank objects to, or the `wanted` one; and on how many hosts the ranks are.

    Raises:
        UsageError: no such provider, or it serves other devices.
        RankMismatchError: ranks with different kinds of device, or that want different providers.
        TileScaleError: the objection to the wanted provider, or UnsupportedError with those to each of them.
    """
    entries = _candidates(device, wanted)
    facts = group.all_gather(call, (_host(), [entry.name for entry in entries]))
    for rank, (_, names) in enumerate(facts):
        if names != facts[0][1]:
            raise RankMismatchError(
                f"rank 0 can take its heap from {facts[0][1]}, rank {rank} from {names}",
                hint="all ranks use the same kind of device, and the same TILESCALE_HEAP",
                where=call.at("this rank"),
            )
    hosts = len({host for host, _ in facts})
    objections: list[str] = []
    for entry in entries:
        found = group.all_gather(call, _objection(entry, device, hosts))
        against = [(rank, error) for rank, error in enumerate(found) if error is not None]
        if not against:
            return entry, hosts
        rank, error = against[0]
        if wanted:
            raise error.at(call.at(f"rank {rank} cannot open a heap of {entry.name}"))
        objections.append(f"{entry.name}: {error.message} (rank {rank})" + (f"; {error.hint}" if error.hint else ""))
    raise UnsupportedError("no provider of symmetric memory works here:\n    " + "\n    ".join(objections))


def _candidates(device: torch.device, wanted: str | None) -> Sequence[ProviderEntry]:
    fitting = [entry for entry in PROVIDERS.values() if entry.device_type == device.type]
    if wanted is None:
        return fitting
    chosen = [entry for entry in fitting if entry.name == wanted]
    if not chosen:
        names = ", ".join(entry.name for entry in fitting) or "none"
        raise UsageError(f"no heap provider {wanted!r} for {device.type} devices", hint=f"there is: {names}")
    return chosen


def _objection(entry: ProviderEntry, device: torch.device, hosts: int) -> TileScaleError | None:
    try:
        return entry.load().objection(device, hosts)
    except Exception as error:  # noqa: BLE001 - a provider that breaks while it is asked is one that does not work
        found = picklable(error)
        return found if isinstance(found, TileScaleError) else UnsupportedError(f"{type(error).__name__}: {error}")


def _host() -> str:
    """Any text that the processes of one running system share, and others do not."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:  # not Linux, where containers of one host differ in name and address
        return f"{socket.gethostname()} {uuid.getnode():x}"
