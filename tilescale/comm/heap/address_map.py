# SPDX-License-Identifier: MIT
"""Addresses of all ranks' heaps as one rank sees them: one address range, equal steps, one slot for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilescale.errors import NoPathError, OutOfBoundsError, PeerOutOfRangeError


@dataclass(frozen=True)
class AddressMap:
    """Byte `offset` of rank p's heap has the address `base + slot(p) * stride + offset`.

    Attributes:
        base: address of slot 0.
        stride: bytes between slots.
        size: bytes of one rank's heap, at most `stride`. Not all of it needs to be mapped yet.
        rank: the rank whose view this is.
        slots: the slot of every rank; None for one whose heap has no address here.
    """

    base: int
    stride: int
    size: int
    rank: int
    slots: tuple[int | None, ...]

    def __post_init__(self) -> None:
        taken = [slot for slot in self.slots if slot is not None]
        sound = (
            0 < self.size <= self.stride
            and self.base >= 0
            and 0 <= self.rank < len(self.slots)
            and self.slots[self.rank] is not None
            and len(set(taken)) == len(taken)
            and all(0 <= slot < len(self.slots) for slot in taken)
        )
        if not sound:
            raise ValueError(f"no address map: {self}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.slots)

    @cached_property
    def shift(self) -> int:
        """The number k with `slot(p) == (p + k) % ranks` for every rank that has an address: all a kernel has to know.

        Raises ValueError if there is none.
        """
        shifts = {(slot - peer) % self.ranks for peer, slot in enumerate(self.slots) if slot is not None}
        if len(shifts) != 1:
            raise ValueError(f"slots {self.slots} are not a rotation of the ranks")
        return shifts.pop()

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The ranks whose heaps have no address here."""
        return tuple(peer for peer, slot in enumerate(self.slots) if slot is None)

    @property
    def reachable(self) -> tuple[int, ...]:
        """The ranks whose heaps have an address here, this one among them."""
        return tuple(peer for peer, slot in enumerate(self.slots) if slot is not None)

    def among(self, ranks: tuple[int, ...]) -> AddressMap:
        """The map of some ranks, of which this is one, in the order of their new numbers.

        Raises ValueError if their slots are not the first ones.
        """
        slots = tuple(self.slots[peer] for peer in ranks)
        return AddressMap(self.base, self.stride, self.size, ranks.index(self.rank), slots)

    def slot(self, peer: int) -> int:
        """The leading index of rank `peer` in a tensor over all ranks.

        Raises PeerOutOfRangeError for a rank that does not exist, NoPathError for one without an address.
        """
        if not 0 <= peer < self.ranks:
            raise PeerOutOfRangeError(f"rank {peer} of a heap of {self.ranks} ranks", hint="ranks count from 0")
        slot = self.slots[peer]
        if slot is None:
            raise NoPathError(
                f"the heap of rank {peer} has no address on rank {self.rank}: no loads and stores lead there",
                hint="exchange data with it by messages",
            )
        return slot

    def address(self, peer: int, offset: int = 0) -> int:
        """The address of byte `offset` of rank `peer`'s heap.

        Raises OutOfBoundsError for an offset outside the heap, and what `slot` raises.
        """
        if not 0 <= offset < self.size:
            raise OutOfBoundsError(f"byte {offset} of a heap of {self.size} bytes")
        return self.base + self.slot(peer) * self.stride + offset

    def offset(self, address: int) -> int:
        """The offset of an address in this rank's own heap. Raises OutOfBoundsError if it is elsewhere."""
        offset = address - self.address(self.rank)
        if not 0 <= offset < self.size:
            raise OutOfBoundsError(f"address {address:#x} lies outside of rank {self.rank}'s heap")
        return offset

    def owns(self, address: int, nbytes: int = 1) -> bool:
        """Whether `nbytes` bytes from `address` on are in this rank's own heap."""
        begin = self.address(self.rank)
        return begin <= address and address + nbytes <= begin + self.size
