# SPDX-License-Identifier: MIT
"""Allocated bytes of a heap. Only offsets: the same calls in the same order give the same offsets anywhere."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 512
"""Bytes: more than bulk copies (16) and vector loads need, so that tensors never share a cache line or a sector."""


def round_up(nbytes: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `nbytes`."""
    return -(-nbytes // step) * step


def _taken(nbytes: int) -> int:
    return max(round_up(nbytes, ALIGNMENT), ALIGNMENT)  # an empty tensor gets a distinct address, too


class Arena:
    """Best fit, lowest offset first; neighbouring free pieces are always merged."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, bytes), in order of offset
        self._used: dict[int, int] = {}

    def add(self, offset: int, nbytes: int) -> None:
        """More space, which overlaps none that is there. Both numbers are multiples of `ALIGNMENT`."""
        self._insert(offset, nbytes)

    def next_offset(self, nbytes: int) -> int | None:
        """The offset that `allocate` would return."""
        piece = self._piece(_taken(nbytes))
        return piece and piece[0]

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `nbytes` free bytes; None if no free piece is large enough."""
        need = _taken(nbytes)
        piece = self._piece(need)
        if piece is None:
            return None
        self._free.remove(piece)
        offset, size = piece
        if size > need:
            insort(self._free, (offset + need, size - need))
        self._used[offset] = need
        return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` gave. Raises KeyError if it is not taken."""
        self._insert(offset, self._used.pop(offset))

    def free_before(self, end: int) -> int:
        """Bytes of the free piece that ends at `end`; 0 if there is none."""
        index = bisect_left(self._free, (end, 0)) - 1
        if index < 0:
            return 0
        offset, size = self._free[index]
        return size if offset + size == end else 0

    def size_of(self, offset: int) -> int:
        """Bytes that are taken at `offset`, rounding included. Raises KeyError if none are."""
        return self._used[offset]

    @property
    def used(self) -> int:
        """Bytes that are taken, rounding included."""
        return sum(self._used.values())

    @property
    def free_pieces(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of all free space, in order."""
        return tuple(self._free)

    def _piece(self, need: int) -> tuple[int, int] | None:
        return min((piece for piece in self._free if piece[1] >= need), key=lambda piece: piece[1], default=None)

    def _insert(self, offset: int, nbytes: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + nbytes:
            nbytes += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            nbytes += before
        self._free.insert(index, (offset, nbytes))
