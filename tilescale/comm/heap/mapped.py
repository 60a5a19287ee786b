# SPDX-License-Identifier: MIT
"""A heap of memory that this process maps itself: one reserved address range, and chunks that all ranks map into it.

A chunk is created on every rank, its handle given to all others, and mapped by each at the same offset of the owner's
slot. Nothing is used before all ranks have said that all of this worked, so that a failure on one leaves all unchanged.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import descriptors
from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.arena import round_up
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.provider import Extent, HeapCannotGrow
from tilescale.errors import DeviceError
from tilescale.hda.units import format_bytes


class Pages(Protocol):
    """Memory of one kind, and the operations that map it into an address range. Every method raises DeviceError if it
    cannot.

    Attributes:
        granularity: sizes and addresses are multiples of it, in bytes.
        chunk: bytes to map at a time, unless more is asked for.
        shared_by_descriptor: handles are sent as file descriptors, otherwise as bytes.
    """

    granularity: int
    chunk: int
    shared_by_descriptor: bool

    def reserve(self, nbytes: int) -> int:
        """The address of a range where nothing is mapped."""
        ...

    def release(self, address: int, nbytes: int) -> None:
        """Give a whole reserved range back."""
        ...

    def create(self, nbytes: int) -> Any:
        """A handle of new memory. Raises MemoryError, which says how much there is, if there is not enough."""
        ...

    def export(self, handle: Any) -> int | bytes:
        """The bytes or descriptor from which another process makes a handle; a descriptor is the caller's to close."""
        ...

    def adopt(self, shared: int | bytes) -> Any:
        """The handle of another process's memory; takes over a descriptor."""
        ...

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Put memory at an address, readable and writable. The handle can be dropped afterwards."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`."""
        ...

    def drop(self, handle: Any) -> None:
        """Forget a handle. The memory lives as long as it is mapped somewhere."""
        ...

    def wait_idle(self) -> None:
        """Wait until the device has done all work that was given to it."""
        ...

    def is_idle_within(self, seconds: float) -> bool:
        """Whether the device gets done with its work in this time."""
        ...


@dataclass(frozen=True)
class _Offer:
    """A rank's contribution: its memory (a mailbox for descriptors, or a handle), or why it has none."""

    shared: str | bytes = b""
    trouble: str | None = None


class MappedHeap:
    """Common base of the providers that map memory themselves. Rank p is in slot p.

    Attributes:
        addresses: addresses of all ranks' heaps.
        capacity: bytes of one rank's heap when it is fully mapped.
        extents: the mapped ranges; adjacent, from offset 0 on.
    """

    freed_at_exit = False

    def __init__(self, group: HeapGroup, pages: Pages, capacity: int):
        """Reserve addresses for `capacity` bytes of every rank."""
        self._group, self._pages = group, pages
        self.capacity = stride = round_up(capacity, pages.granularity)
        self._reserved = stride * group.size
        base = pages.reserve(self._reserved)
        self.addresses = AddressMap(base, stride, stride, group.rank, tuple(range(group.size)))
        self.extents: list[Extent] = []
        self._mappings: list[tuple[int, int]] = []

    def grow(self, nbytes: int, tail: int, call: CollectiveCall) -> Extent:
        """Map a chunk on all ranks; see `Provider.grow`."""
        begin = sum(extent.nbytes for extent in self.extents)
        room = self.capacity - begin
        least = round_up(nbytes - tail, self._pages.granularity)
        if least > room:
            raise HeapCannotGrow.full(self.capacity, room, least)
        preferred = max(least, min(self._pages.chunk, room))
        trouble: dict[int, str] = {}
        for size in dict.fromkeys((preferred, least)):
            trouble = self._try_chunk(begin, size, call)
            if not trouble:
                self.extents.append(Extent(begin, size))
                return self.extents[-1]
        rank, text = min(trouble.items())
        raise HeapCannotGrow(
            f"rank {rank} got no {format_bytes(least)} more: {text}", "free memory there, or ask for less"
        )

    def wait_idle(self) -> None:
        self._pages.wait_idle()

    def close(self) -> None:
        """Unmap and release everything. Peers keep their mappings of this rank's memory until they close."""
        if not self._pages.is_idle_within(seconds=10.0):
            return  # something still runs in there, maybe for ever; the end of the process frees all
        self._unmap(0)
        self._pages.release(self.addresses.base, self._reserved)

    def _try_chunk(self, begin: int, nbytes: int, call: CollectiveCall) -> dict[int, str]:
        """Make and map a chunk, and say which ranks failed, and why; then nothing has changed."""
        mark = len(self._mappings)
        with ExitStack() as stack:
            own, mailbox, trouble = self._create(nbytes, stack)
            if mailbox is not None:
                shared: str | bytes = mailbox.name
            else:
                shared = b"" if trouble else self._token(own)
            offers = self._group.all_gather(call, _Offer(shared, trouble))
            failed = {rank: offer.trouble for rank, offer in enumerate(offers) if offer.trouble is not None}
            if failed:
                return failed
            outcome = self._share_and_map(begin, nbytes, own, mailbox, offers, call)
            outcomes = self._group.all_gather(call, outcome)  # all ranks have used this rank's handle
        failed = {rank: text for rank, text in enumerate(outcomes) if text is not None}
        if failed:
            self._unmap(mark)
        return failed

    def _create(self, nbytes: int, stack: ExitStack) -> tuple[Any, descriptors.Mailbox | None, str | None]:
        """A handle of new memory, where others can leave theirs if it is a descriptor, and why there is neither."""
        try:
            handle = self._pages.create(nbytes)
            stack.callback(self._pages.drop, handle)
            mailbox = None
            if self._group.size > 1 and self._pages.shared_by_descriptor:
                mailbox = descriptors.Mailbox()
                stack.callback(mailbox.close)
            return handle, mailbox, None
        except (MemoryError, DeviceError, OSError) as error:
            return None, None, str(error)

    def _token(self, handle: Any) -> bytes:
        token = self._pages.export(handle) if self._group.size > 1 else b""
        assert isinstance(token, bytes)
        return token

    def _share_and_map(
        self,
        begin: int,
        nbytes: int,
        own: Any,
        mailbox: descriptors.Mailbox | None,
        offers: list[_Offer],
        call: CollectiveCall,
    ) -> str | None:
        """Map the memory of all ranks; returns an error text. Raises RankFailedError or LaunchError if a rank is
        gone."""
        shared: dict[int, Any] = {rank: offer.shared for rank, offer in enumerate(offers)}
        if mailbox is not None:
            shared = self._swap_descriptors(own, mailbox, [str(offer.shared) for offer in offers], call)
        try:
            for rank in range(self._group.size):
                self._map(rank, begin, nbytes, own if rank == self._group.rank else None, shared)
        except DeviceError as error:
            return str(error)
        finally:
            for left in shared.values():
                if isinstance(left, int):
                    os.close(left)
        return None

    def _swap_descriptors(
        self, own: Any, mailbox: descriptors.Mailbox, names: list[str], call: CollectiveCall
    ) -> dict[int, int]:
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        descriptor = self._pages.export(own)
        assert isinstance(descriptor, int)
        try:
            return descriptors.exchange(self._group, call, mailbox, names, descriptor, others)
        finally:
            os.close(descriptor)

    def _map(self, rank: int, begin: int, nbytes: int, own: Any, shared: dict[int, Any]) -> None:
        handle = own if own is not None else self._pages.adopt(shared.pop(rank))
        try:
            address = self.addresses.address(rank, begin)
            self._pages.map(address, nbytes, handle)
            self._mappings.append((address, nbytes))
        finally:
            if own is None:
                self._pages.drop(handle)

    def _unmap(self, mark: int) -> None:
        """Undo all mappings but the first `mark`."""
        while len(self._mappings) > mark:
            self._pages.unmap(*self._mappings.pop())
