# SPDX-License-Identifier: MIT
"""Holders of each block: a block is free again when every rank has released it.

Ranks release in any order, whenever their garbage collectors run. So a release stays a local fact until the next
collective allocation, where each rank reports the blocks that it has released since the last one. All ranks then have
the same ledger, and give the same offsets.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilescale.comm.heap.arena import Arena


@dataclass
class HeapBlock:
    """A piece of the heap that belongs to one tensor on every rank.

    Attributes:
        number: counts the allocations; the same on all ranks.
        offset: where it begins in the heap, in bytes.
        nbytes: bytes that were asked for.
        held_by: ranks that have not released it, as far as all ranks know.
    """

    number: int
    offset: int
    nbytes: int
    held_by: set[int]


class Ledger:
    """The blocks of a heap of `ranks` ranks. Every rank has a ledger; all go through the same calls."""

    def __init__(self, ranks: int):
        self.arena = Arena()
        self._ranks = ranks
        self._count = 0
        self._blocks: dict[int, HeapBlock] = {}
        self._order: list[tuple[int, int]] = []  # (offset, number) of all blocks

    def allocate(self, nbytes: int) -> HeapBlock | None:
        """A new block that all ranks hold; None if it does not fit."""
        offset = self.arena.allocate(nbytes)
        if offset is None:
            return None
        block = HeapBlock(self._count, offset, nbytes, set(range(self._ranks)))
        self._count += 1
        self._blocks[block.number] = block
        insort(self._order, (block.offset, block.number))
        return block

    def settle(self, released: Sequence[Iterable[int]]) -> None:
        """Record the numbers of the blocks that each rank has released; blocks released by all ranks are free."""
        for rank, numbers in enumerate(released):
            for number in numbers:
                block = self._blocks[number]
                block.held_by.remove(rank)
                if not block.held_by:
                    self.arena.free(block.offset)
                    del self._blocks[number]
                    self._order.remove((block.offset, number))

    def find(self, offset: int, nbytes: int) -> HeapBlock | None:
        """The block that holds `nbytes` bytes from `offset` on; None if there is none."""
        index = bisect_right(self._order, (offset, self._count)) - 1
        if index < 0:
            return None
        block = self._blocks[self._order[index][1]]
        return block if offset + nbytes <= block.offset + block.nbytes else None

    @property
    def blocks(self) -> tuple[HeapBlock, ...]:
        """All blocks that some rank holds, oldest first."""
        return tuple(self._blocks.values())
