# SPDX-License-Identifier: MIT
"""The symmetric heap: tensors that exist on every rank at the same offset, and that every rank can reach on all ranks.

Allocation is collective: every rank makes the same calls in the same order. Everything else is local.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import open_heaps
from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.ledger import HeapBlock, Ledger
from tilescale.comm.heap.provider import HeapCannotGrow, choose
from tilescale.comm.heap.tensors import contiguous_strides, extent, instances_of, tensor_at
from tilescale.comm.refusal import notifies
from tilescale.comm.team import Team
from tilescale.errors import (
    ArgumentError,
    HeapExhaustedError,
    Location,
    NoPathError,
    RankMismatchError,
    ShapeError,
    UsageError,
    check_type,
)
from tilescale.hda.units import format_bytes
from tilescale.settings import settings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Usage:
    """Bytes of a heap on one rank.

    Attributes:
        capacity: to how many it may grow.
        mapped: how many it has taken from the device.
        used: how many belong to tensors, rounded up to whole pieces.
        pending: how many of the used ones this rank has released, while another rank still has them.
    """

    capacity: int
    mapped: int
    used: int
    pending: int

    @property
    def free(self) -> int:
        """Number of bytes that may still be used, if the pieces fit."""
        return self.capacity - self.used


@dataclass(frozen=True)
class _Request:
    """One rank's allocation request, with the blocks that it has released since the last one."""

    shape: tuple[int, ...]
    dtype: str
    where: Location
    released: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


def _team(heap: SymmetricHeap, *_: Any, **__: Any) -> Team:
    return heap.team


class SymmetricHeap:
    """Symmetric memory of a team of ranks.

    A tensor's memory is in use as long as the tensor or any view of it lives, on any rank. It is reused by a later
    allocation, once all ranks have released it.

    Attributes:
        team: the ranks.
        device: where this rank's tensors are.
        provider: name of the provider of the memory.
    """

    def __init__(
        self, team: Team, device: torch.device | str, *, provider: str | None = None, capacity: int | None = None
    ):
        """Collective: an empty heap.

        Args:
            team: the ranks that share it.
            device: the device of this rank's tensors.
            provider: "cuda_vmm", "nvshmem" or "host"; None takes TILESCALE_HEAP, or else the first that works.
            capacity: maximum size on each rank in bytes; None takes TILESCALE_HEAP_BYTES, or else the provider's
                default for the device. All ranks take the minimum over the ranks.
        Raises:
            UsageError: an unknown provider, or a capacity that is not positive.
            RankMismatchError: ranks with different kinds of device or provider.
            DependencyError: a package of the wanted provider is missing.
            DeviceError: the device, its driver or the operating system refuses what the wanted provider needs.
            UnsupportedError: no provider works with these devices.
        """
        import torch

        call = CollectiveCall.here("SymmetricHeap")
        if capacity is not None and capacity <= 0:
            raise UsageError(f"a heap of {capacity} bytes", hint="give a positive capacity", where=call.where)
        self.team, self.device = team, torch.empty(0, device=device).device  # with its index
        self._group = HeapGroup(team)
        entry, hosts = choose(self._group, self.device, provider or settings().heap, call)
        self.provider = entry.name
        home = entry.load()
        own = capacity or settings().heap_bytes or home.suggest(self.device, team.size)
        capacity = min(self._group.all_gather(call, own))
        self._memory = home.open(self._group, self.device, hosts, capacity, call)
        self._ledger = Ledger(team.size)
        for piece in self._memory.extents:
            self._ledger.arena.add(*piece)
        self._released: deque[int] = deque()  # garbage collection appends to it at any moment, from any thread
        self._reported: set[int] = set()  # numbers of blocks that this rank has reported as released
        self._open = True
        open_heaps.add(self)

    @property
    def addresses(self) -> AddressMap:
        """Addresses of all ranks' heaps as this rank sees them."""
        return self._memory.addresses

    @property
    def is_open(self) -> bool:
        """Whether the heap can be used; False after `close`."""
        return self._open

    @property
    def freed_at_exit(self) -> bool:
        """Whether the end of the process gives all memory back by itself."""
        return self._memory.freed_at_exit

    @notifies(_team)
    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Collective: a contiguous symmetric tensor with arbitrary contents.

        Args:
            shape: the same on all ranks.
            dtype: the same on all ranks; None is PyTorch's default.
        Raises:
            RankMismatchError: ranks ask for different shapes or types, or make different calls.
            HeapExhaustedError: it does not fit.
            ShapeError: a negative extent.
            UsageError: the heap is closed, or a CUDA graph is being captured.
        """
        return self._allocate(CollectiveCall.here("empty"), shape, dtype)

    @notifies(_team)
    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Collective: a symmetric tensor of zeros, on all ranks by the time that this returns. Raises as `empty`."""
        return self._allocate(CollectiveCall.here("zeros"), shape, dtype, lambda made: made.zero_())

    @notifies(_team)
    def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: a contiguous symmetric copy of `tensor`, which has the same shape and type on all ranks.

        All ranks' copies are complete by the time that this returns. Raises as `empty`, and ArgumentError for a tensor
        that is sparse, nested, quantized or without data (meta).
        """
        import torch

        check_type("tensor", tensor, "a torch.Tensor", torch.Tensor)
        _check_dense(tensor)
        call, value = CollectiveCall.here("from_tensor"), tensor.detach()
        # The heap's memory has no address on a GPU of which it is not a peer: the tensor comes to the heap's device.
        value = value.to(self.device) if value.is_cuda else value
        return self._allocate(call, value.shape, value.dtype, lambda made: made.copy_(value))

    def peers(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' instances of a symmetric tensor or of a view of one: its shape after a dimension of the ranks.

        Rank p's instance is at index `addresses.slot(p)`. A local operation without a copy: writes to the result go to
        the peer. The result keeps this rank's instance alive; a peer keeps its own.

        Raises NotSymmetricError for another tensor, NoPathError if a rank's memory has no address here.
        """
        offset = self.offset(tensor)
        view = self.addresses
        if view.unreachable:
            raise NoPathError(f"the heaps of ranks {list(view.unreachable)} have no address on rank {view.rank}")
        return instances_of(tensor, offset, view)

    def offset(self, tensor: torch.Tensor) -> int:
        """The byte in the heap where a symmetric tensor, or a view of one, begins: the same on all ranks.

        Raises NotSymmetricError for a tensor that is not in this heap.
        """
        offset = self._find(tensor)
        if offset is None:
            raise open_heaps.not_symmetric(tensor, self)
        return offset

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether this is a tensor of this heap, or a view of one."""
        return self._find(tensor) is not None

    def usage(self) -> Usage:
        """Fill level of the heap on this rank."""
        released = {*self._reported, *self._released}
        return Usage(
            capacity=self._memory.capacity,
            mapped=sum(piece.nbytes for piece in self._memory.extents),
            used=self._ledger.arena.used,
            pending=sum(self._ledger.arena.size_of(b.offset) for b in self._ledger.blocks if b.number in released),
        )

    def close(self) -> None:
        """Give all memory back. Every rank does so, at any time; closing again does nothing.

        Raises UsageError while tensors of this rank are alive.
        """
        if not self._open:
            return
        _collect()
        alive = len(self._ledger.blocks) - len({*self._reported, *self._released})
        if alive:
            raise UsageError(f"{alive} tensors of the heap are still in use", hint="delete them, and all views of them")
        self.end()

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # else the traceback may hold tensors; the end of the process closes the heap
            self.close()

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"SymmetricHeap({self.provider} on {self.device}, rank {self.team.rank} of {self.team.size}{state})"

    def end(self) -> None:
        """Give all memory back, even while tensors are alive: they must not be used any more."""
        self._open = False
        open_heaps.remove(self)
        self._memory.close()

    def _allocate(
        self,
        call: CollectiveCall,
        shape: int | Sequence[int],
        dtype: torch.dtype | None,
        fill: Callable[[torch.Tensor], object] | None = None,
    ) -> torch.Tensor:
        """A tensor, which `fill` has filled on all ranks. Mapped memory is filled before the ranks agree, so that they
        need not meet again afterwards."""
        import torch

        self._check_ready(call)
        check_type("shape", shape, "a number, or a sequence of them", SupportsIndex, Sequence)
        for size in shape if isinstance(shape, Sequence) else ():
            check_type("shape", size, "numbers", SupportsIndex)
        extents = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
        if any(size < 0 for size in extents):
            raise ShapeError(f"a symmetric tensor of shape {extents}", where=call.where)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_type("dtype", dtype, "a torch.dtype", torch.dtype)
        nbytes = math.prod(extents) * dtype.itemsize

        def tensor(offset: int, *on_release: Any) -> torch.Tensor:
            address = self.addresses.address(self.team.rank, offset)
            return tensor_at(address, extents, contiguous_strides(extents), dtype, self.device, *on_release)

        with self.team.one_call:  # no other thread takes the memory that is filled
            offset = None if fill is None else self._ledger.arena.next_offset(nbytes)
            if fill is not None and offset is not None:
                fill(tensor(offset, lambda: None))
                self._memory.wait_idle()
            block = self._agree(call, extents, str(dtype), None if offset is None else nbytes)
            block = self._place(call, nbytes) if block is None else block
            made = tensor(block.offset, self._released.append, block.number)
            if fill is not None and offset is None:
                fill(made)
                self._memory.wait_idle()
                self._group.all_gather(call, None)
        return made

    def _agree(
        self, call: CollectiveCall, shape: tuple[int, ...], dtype: str, filled: int | None
    ) -> HeapBlock | None:
        """Exchange the requests and the released blocks; returns the block of `filled` bytes, where they are filled.
        Raises RankMismatchError."""
        requests = self._group.all_gather(call, _Request(shape, dtype, call.where, self._newly_released()))
        own = requests[self.team.rank]
        others = [rank for rank, each in enumerate(requests) if (each.shape, each.dtype) != (shape, dtype)]
        # Not after blocks were released: then it would be placed elsewhere.
        block = None if filled is None or others else self._ledger.allocate(filled)
        self._settle([request.released for request in requests])
        if others:
            rank = others[0]
            raise RankMismatchError(
                f"rank {self.team.rank} allocates {own}, rank {rank} allocates {requests[rank]}",
                hint="all ranks allocate the same symmetric tensors in the same order",
                where=[
                    call.at(f"rank {self.team.rank}"),
                    CollectiveCall(call.op, None, requests[rank].where).at(f"rank {rank}"),
                ],
            )
        return block

    def _place(self, call: CollectiveCall, nbytes: int) -> HeapBlock:
        """Allocate a block, in mapped memory or in more. All ranks decide alike. Raises HeapExhaustedError."""
        arena = self._ledger.arena
        block = self._ledger.allocate(nbytes)
        if block is not None:
            return block
        end = max((sum(piece) for piece in self._memory.extents), default=0)
        try:
            arena.add(*self._memory.grow(max(nbytes, 1), arena.free_before(end), call))
        except HeapCannotGrow as refusal:
            _collect()  # on all ranks: tensors in reference cycles are not released before
            self._settle(self._group.all_gather(call, self._newly_released()))
            block = self._ledger.allocate(nbytes)
            if block is None:
                raise self._exhausted(call, nbytes, refusal) from None
            return block
        block = self._ledger.allocate(nbytes)
        assert block is not None, "the heap has just grown by as much"
        return block

    def _newly_released(self) -> tuple[int, ...]:
        """Blocks released here since the last call; nothing that runs on the device uses them any more."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        if released:
            self._memory.wait_idle()
        self._reported.update(released)
        return tuple(released)

    def _settle(self, released: Sequence[tuple[int, ...]]) -> None:
        self._ledger.settle(released)
        self._reported &= {block.number for block in self._ledger.blocks}

    def _find(self, tensor: torch.Tensor) -> int | None:
        if tensor.device != self.device or not self._open or tensor.is_sparse:
            return None
        itemsize = tensor.dtype.itemsize
        address = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * itemsize
        nbytes = extent(tensor.shape, tensor.stride()) * itemsize
        if not self.addresses.owns(address, nbytes):
            return None
        offset = self.addresses.offset(address)
        return None if self._ledger.find(offset, nbytes) is None else offset

    def _check_ready(self, call: CollectiveCall) -> None:
        import torch

        if not self._open:
            raise UsageError("the heap is closed", where=call.where)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a symmetric tensor is allocated while a CUDA graph is captured",
                hint="allocate before the capture: it needs all ranks, and waits for the device",
                where=call.where,
            )

    def _exhausted(self, call: CollectiveCall, nbytes: int, refusal: HeapCannotGrow) -> HeapExhaustedError:
        usage = self.usage()
        largest = max((size for _, size in self._ledger.arena.free_pieces), default=0)
        waiting = f", {format_bytes(usage.pending)} released here but not by all ranks" if usage.pending else ""
        return HeapExhaustedError(
            f"symmetric heap exhausted: asked for {format_bytes(nbytes)}; {format_bytes(usage.mapped - usage.used)} of "
            f"{format_bytes(usage.mapped)} mapped are free (largest piece {format_bytes(largest)}{waiting}), and "
            f"the heap cannot grow: {refusal}",
            hint=refusal.hint,
            where=call.at("asks for it"),
        )


def _check_dense(tensor: torch.Tensor) -> None:
    """Raise ArgumentError for a tensor that is not contiguous in memory."""
    import torch

    kinds = {
        f"of layout {tensor.layout}": tensor.layout is not torch.strided,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "without data (meta)": tensor.is_meta,
    }
    for kind, found in kinds.items():
        if found:
            raise ArgumentError(f"tensor is {kind}", hint="pass a dense tensor with data")


def _collect() -> None:
    """Collect garbage in reference cycles, among objects too that are frozen until a full collection has ended."""
    frozen = gc.get_freeze_count()
    gc.collect()
    if gc.get_freeze_count() < frozen:
        gc.collect()
