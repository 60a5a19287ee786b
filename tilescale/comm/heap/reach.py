# SPDX-License-Identifier: MIT
"""The part of a symmetric heap that a rank reaches by addresses, where the heap has more ranks than those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.heap import SymmetricHeap
from tilescale.comm.heap.tensors import instances_of
from tilescale.comm.team import Team

if TYPE_CHECKING:
    import torch


class Reach:
    """Range of loads and stores in a heap whose other ranks are reached by a library's functions.

    Attributes:
        team: the ranks that have an address here, this one among them.
        device: where this rank's tensors are.
        addresses: the map of these ranks.
    """

    def __init__(self, heap: SymmetricHeap):
        self._heap = heap
        ranks = heap.addresses.reachable
        self.team = Team(
            ranks=tuple(heap.team.ranks[r] for r in ranks),
            rank=ranks.index(heap.team.rank),
            _session=heap.team._session,
        )
        self.device = heap.device
        self.addresses: AddressMap = heap.addresses.among(ranks)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the heap. Collective over all ranks of the heap. Raises as `SymmetricHeap.zeros`."""
        return self._heap.zeros(shape, dtype)

    def peers(self, tensor: torch.Tensor) -> torch.Tensor:
        """The instances of these ranks, as `SymmetricHeap.peers`. Raises NotSymmetricError for another tensor."""
        return instances_of(tensor, self._heap.offset(tensor), self.addresses)


def reach(heap: SymmetricHeap) -> SymmetricHeap | Reach:
    """The heap itself, if all of its ranks have an address here; else the part of those that have one."""
    return Reach(heap) if heap.addresses.unreachable else heap
