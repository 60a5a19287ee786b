# SPDX-License-Identifier: MIT
"""Heap provider `nvshmem`: memory of NVSHMEM's own symmetric heap, for kernels that also call NVSHMEM.

NVSHMEM maps the heaps of the n peers that a GPU reaches into one address range with a fixed stride. For number r of
them, the heap of number p is (p - r) mod n steps further; every chunk is checked for that. Peers on other nodes have no
address: only NVSHMEM's functions reach them.

NVSHMEM's own calls wait for all ranks without a bound. Each is made when all ranks are known to make it, and ends the
process with a traceback if it still takes longer than the job's timeout.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.arena import ALIGNMENT, round_up
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.provider import Extent, HeapCannotGrow
from tilescale.errors import DependencyError, DeviceError, TileScaleError, UnsupportedError
from tilescale.hda.units import format_bytes
from tilescale.settings import set_default

if TYPE_CHECKING:
    import torch

_CHUNK = 512 << 20  # NVSHMEM itself takes memory from the device in such steps
_LARGEST = 64 << 30
_GRANULARITY = 2 << 20


def address_map(own: int, pointers: Sequence[int], rank: int, alone: int) -> AddressMap:
    """The map that puts every peer where NVSHMEM says that it is. Raises UnsupportedError: the peers are not where one
    stride and one rotation put them.

    Args:
        own: address of a symmetric object on this rank.
        pointers: what nvshmem_ptr gives for it on each rank; 0 for a rank without an address.
        rank: this rank.
        alone: the stride if no peer has an address, in bytes.
    """
    distances = {peer: pointer - own for peer, pointer in enumerate(pointers) if pointer}
    own_number = [*distances].index(rank) if rank in distances else 0
    steps = {peer: (number - own_number) % len(distances) for number, peer in enumerate(distances)}
    ahead = [(distances[peer], count) for peer, count in steps.items() if peer != rank]
    stride = ahead[0][0] // ahead[0][1] if ahead else alone
    if distances.get(rank) != 0 or any(distance != count * stride or distance <= 0 for distance, count in ahead):
        raise UnsupportedError(
            f"NVSHMEM puts the peers of rank {rank} at distances {distances} from it, not one stride apart",
            hint="use TILESCALE_HEAP=cuda_vmm, or a version of NVSHMEM that was tested",
        )
    return AddressMap(own, stride, stride, rank, tuple(steps.get(peer) for peer in range(len(pointers))))


class Nvshmem:
    """Chunks that NVSHMEM allocated, seen as one heap. See `Provider`."""

    freed_at_exit = False

    _users = 0  # open heaps in this process that rely on our initialisation of NVSHMEM
    _started_here = False

    def __init__(self, group: HeapGroup, device: torch.device, capacity: int, call: CollectiveCall):
        """Collective: start NVSHMEM unless it runs, and allocate a first chunk, which shows where the peers are."""
        import nvshmem.bindings as bindings

        self._bindings, self._group, self._device = bindings, group, device
        self.capacity = capacity
        self._pieces: list[int] = []
        with _bounded(group.timeout_s):
            self._start(call)
        Nvshmem._users += 1
        chunk = min(_CHUNK, capacity)
        address = self._allocate(chunk, call)
        if address is None:
            self.close()
            raise DeviceError(
                f"NVSHMEM has no {format_bytes(chunk)}",
                hint="raise NVSHMEM_SYMMETRIC_SIZE and NVSHMEM_MAX_MEMORY_PER_GPU, or lower TILESCALE_HEAP_BYTES",
            )
        # Twice the capacity, because there are gaps between chunks.
        self.addresses = address_map(address, self._pointers(address), group.rank, alone=2 * capacity)
        self.extents = [Extent(0, chunk)]
        self._agree(self._same_view(address), call)

    @classmethod
    def objection(cls, device: torch.device, hosts: int) -> TileScaleError | None:
        """Packages that are missing."""
        try:
            import cuda.core  # noqa: F401
            import nvshmem.core  # noqa: F401
        except ImportError as error:
            return DependencyError(
                f"NVSHMEM's Python package does not load: {error}", hint="pip install nvshmem4py-cu13 cuda-core"
            )
        return None

    @classmethod
    def suggest(cls, device: torch.device, ranks: int) -> int:
        """The device's memory, at most 64 GiB."""
        import torch

        return min(torch.cuda.get_device_properties(device).total_memory, _LARGEST)

    @classmethod
    def open(cls, group: HeapGroup, device: torch.device, hosts: int, capacity: int, call: CollectiveCall) -> Nvshmem:
        """A heap with one chunk."""
        return cls(group, device, capacity, call)

    def grow(self, nbytes: int, tail: int, call: CollectiveCall) -> Extent:
        """Allocate one more chunk. Chunks are not adjacent, so `tail` is of no use."""
        taken = sum(extent.nbytes for extent in self.extents)
        least, room = round_up(nbytes, _GRANULARITY), self.capacity - taken
        if least > room:
            raise HeapCannotGrow.full(self.capacity, room, least)
        for size in dict.fromkeys((max(least, min(_CHUNK, room)), least)):
            address = self._allocate(size, call)
            if address is not None:
                self._agree(self._same_view(address), call)
                offset = address - self.addresses.address(self.addresses.rank)
                self.extents.append(Extent(offset, size))
                return self.extents[-1]
        raise HeapCannotGrow(
            f"NVSHMEM has no {format_bytes(least)} more", "raise NVSHMEM_MAX_MEMORY_PER_GPU, or free device memory"
        )

    def wait_idle(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the chunks and end NVSHMEM with its last heap, if all ranks are there to do the same."""
        call = CollectiveCall.here("the end of the heap")
        try:
            self._group.all_gather(call, None)
        except TileScaleError:
            return  # a rank is gone: NVSHMEM would wait for it
        with _bounded(self._group.timeout_s), self._on_device():
            self.wait_idle()
            for piece in self._pieces:
                self._bindings.free(piece)
            Nvshmem._users -= 1
            if Nvshmem._users == 0 and Nvshmem._started_here:
                import nvshmem.core

                nvshmem.core.finalize()
                Nvshmem._started_here = False

    def _start(self, call: CollectiveCall) -> None:
        import nvshmem.core as core
        from cuda.core import Device

        core.get_version()  # loads the library
        states = core.InitStatus
        working = (states.STATUS_IS_INITIALIZED, states.STATUS_LIMITED_MPG, states.STATUS_FULL_MPG)
        running = core.init_status() in working
        if not any(self._group.all_gather(call, running)):
            set_default("NVSHMEM_DISABLE_NVLS", "1")  # multicast can put GPUs out of service that others share
            set_default("NVSHMEM_DISABLE_NCCL", "1")  # its collectives are its own, not those of a library it found
            own = core.get_unique_id() if self._group.rank == 0 else None
            unique_id = self._group.all_gather(call, own)[0]
            with self._on_device():
                device = Device(self._device.index)
                device.set_current()
                core.init(
                    device=device,
                    uid=unique_id,
                    rank=self._group.rank,
                    nranks=self._group.size,
                    initializer_method="uid",
                )
            Nvshmem._started_here = True
        elif (core.my_pe(), core.n_pes()) != (self._group.rank, self._group.size):
            raise UnsupportedError(
                f"NVSHMEM runs already, as rank {core.my_pe()} of {core.n_pes()}; the heap's team has this process as "
                f"rank {self._group.rank} of {self._group.size}",
                hint="take the heap from the team that NVSHMEM was started with",
            )

    def _allocate(self, nbytes: int, call: CollectiveCall) -> int | None:
        """The aligned address of a new chunk on this rank; None if NVSHMEM gives none on some rank."""
        with _bounded(self._group.timeout_s), self._on_device():
            piece = self._bindings.malloc(nbytes + ALIGNMENT)
        given = self._group.all_gather(call, bool(piece))
        if piece and all(given):
            self._pieces.append(piece)
            return round_up(piece, ALIGNMENT)
        return None  # a failed allocation is the same on all ranks, since all asked for the same

    def _pointers(self, address: int) -> list[int]:
        with self._on_device():
            return [self._bindings.ptr(address, peer) for peer in range(self._group.size)]

    def _same_view(self, address: int) -> str | None:
        """The error of a chunk: it is outside of the range, or a peer's is not at the address of the map."""
        view = self.addresses
        offset = address - view.address(view.rank)
        if not 0 <= offset < view.stride:
            return f"NVSHMEM put a chunk at {address:#x}, outside of the range that begins at {view.base:#x}"
        expected = [0 if s is None else view.base + s * view.stride + offset for s in view.slots]
        found = self._pointers(address)
        return None if found == expected else f"NVSHMEM puts a chunk at {found}, expected was {expected}"

    def _agree(self, trouble: str | None, call: CollectiveCall) -> None:
        offsets = [e.offset for e in self.extents]
        views = self._group.all_gather(call, (trouble, offsets, self.addresses.stride))
        for rank, (text, others, stride) in enumerate(views):
            if text is not None:
                raise UnsupportedError(f"on rank {rank}: {text}", where=call.at("this rank"))
            if (others, stride) != (offsets, self.addresses.stride):
                raise UnsupportedError(f"NVSHMEM's heap on rank {rank} differs from that on rank {self._group.rank}")

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        import torch

        return torch.cuda.device(self._device)


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
