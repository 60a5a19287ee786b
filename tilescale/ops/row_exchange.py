# SPDX-License-Identifier: MIT
"""Rows that go to ranks by tables, and sums of what becomes of them: unequal exchanges, and those of experts.

Blocks move the rows, as only the device knows which ones: a block loads a tile of them where they lie, stores it into
the owner's inbox and raises a flag. A grid that only sends ends whatever others do, so the one after it may wait.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.ops.flat import dtype_of
from tilescale.ops.kernels import kernel
from tilescale.ops.workspace import workspace_of

THREADS = 256

TILE = 8192
"""Elements that one block moves: of 4 bytes, eight times 16 bytes in flight for each thread."""

PIECE = 512
"""Elements of a row that one block moves, at most."""

MOST_UNEVEN = 32
"""Units of a row, at most, where the threads do not share a tile evenly."""

CHUNKS = 256
"""Flags for what one rank sends to another one."""

UNIT_BYTES = 16
"""Rows are a multiple of so many bytes: what a thread loads or stores at once."""


def scatter_rows(x: torch.Tensor, order: torch.Tensor, sent: torch.Tensor, arriving: tuple, team: Team) -> torch.Tensor:
    """Rows of all ranks, where tables say.

    Args:
        x: (rows, bytes), uint8, as many on all ranks, contiguous; a row is a multiple of `UNIT_BYTES`.
        order: (ranks, most), int32: the own rows that go to each rank, one slot after the other. `most` is what any
            rank sends to any other at most, the same on all ranks.
        sent: (ranks,), int32: how many they are.
        arriving: how many come from each rank, (ranks,), int32; the rows of the result that each of them becomes,
            (ranks, most, copies), int32, -1 for none; and how many rows the result has.
        team: who takes part.

    Returns:
        (rows, bytes). Rows that no place names are not written.
    """
    received, places, room = arriving
    words = x.view(torch.int32)
    width, most = words.shape[1], order.shape[1]
    (inbox,) = workspace_of(team).symmetric(torch.int32, (team.size, most, width))
    result = words.new_empty(room, width)
    made = kernel(scatter_program, team, width, places.shape[2])
    made(words, order, sent, inbox, received, places, result)
    return result.view(torch.uint8)


def sum_rows(y: torch.Tensor, weights: torch.Tensor | None, arriving: tuple, before: torch.Tensor, team: Team) -> Any:
    """What becomes of rows that `scatter_rows` has sent out, summed up where they came from.

    Each rank sums the copies of a row, times their weights, in float32 and in their order; and rounds. Where the row
    came from, the sums of the ranks are added up in float32, in the order of ranks.

    Args:
        y: (rows, width), contiguous; a row is a multiple of `UNIT_BYTES`.
        weights: (rows,), float32, or None for ones.
        arriving: as for `scatter_rows`.
        before: (most + 1, ranks), int32: how many rows before each own one went to each rank.
        team: who takes part.

    Returns:
        (most, width).
    """
    received, places, _ = arriving
    width, most = y.shape[1], before.shape[0] - 1
    (inbox,) = workspace_of(team).symmetric(y.dtype, (team.size, most, width))
    result = y.new_empty(most, width)
    given = y.new_empty(1, dtype=torch.float32) if weights is None else weights
    made = kernel(sum_program, team, width, places.shape[2], dtype_of(y), UNIT_BYTES // y.itemsize, weights is not None)
    made(y, given, received, places, inbox, before, result)
    return result


def piece(width: int, unit: int) -> int:
    """Elements of a row that one block moves: the largest divisor that is a multiple of `unit` and not too wide.

    TileLang lays out no tile of a few rows that its threads cannot share evenly; it does if there are many rows.
    """

    def fits(n: int) -> bool:
        return n // unit <= MOST_UNEVEN or n // unit * tile_rows(n) % THREADS == 0

    return next(n for n in range(min(width, PIECE), 0, -1) if width % n == 0 and n % unit == 0 and fits(n))


def tile_rows(width: int) -> int:
    """Rows of a block's tile, a power of two: one for each thread at most."""
    return min(1 << (TILE // width).bit_length() - 1, THREADS)


def tiles_in(number: Any, chunk: Any, rows: Any, high: int) -> Any:
    """Tiles of chunk `number`, of those of so many rows."""
    return T.min(chunk, T.ceildiv(rows, high) - number * chunk)


@T.macro
def load_rows(rows, which, X, order, owner, first, column, most):
    """A tile of the rows that go to a rank; beyond the last one, of any."""
    for i in T.Parallel(rows.shape[0]):
        which[i] = order[owner, T.min(first + i, most - 1)]
    for i, j in T.Parallel(rows.shape[0], rows.shape[1]):
        rows[i, j] = X[which[i], column + j]


@T.macro
def load_places(which, places, received, source, first, most):
    """The places of a tile of what comes from a rank; -1 for a row beyond the last one."""
    for i, c in T.Parallel(which.shape[0], which.shape[1]):
        place = places[source, T.min(first + i, most - 1), c]
        which[i, c] = T.if_then_else(first + i < received[source], place, -1)


def scatter_program(size: int, width: int, copies: int) -> Any:
    """R[places[s, i]] = X[order[s][i]] of rank s; rows of `width` words."""
    given, most, room = T.dynamic("given"), T.dynamic("most"), T.dynamic("room")
    wide = piece(width, UNIT_BYTES // 4)
    high, parts = tile_rows(wide), width // wide

    @T.prim_func
    def scatter_rows(
        X: T.Tensor((given, width), "int32"),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        inbox: T.Tensor((size, most, width), "int32"),  # by source
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, copies), "int32"),
        R: T.Tensor((room, width), "int32"),
    ):
        with T.Kernel(device=size, block=(T.ceildiv(most, high), parts, size), threads=THREADS) as (tile, part, turn):
            arrived = T.alloc_flags((size, CHUNKS))
            T.assume(most >= 1)
            if size > 1:
                with T.Scale("block"), T.Scale("device") as (rank, _):
                    rows, which = T.alloc((high, wide), "int32", level="l0"), T.alloc((high,), "int32", level="l1")
                    owner, first, column = (rank + 1 + turn) % size, tile * high, part * wide
                    chunk = tile // T.ceildiv(most, high * CHUNKS)
                    if owner != rank and first < sent[owner]:
                        load_rows(rows, which, X, order, owner, first, column, most)
                        T.copy(rows, inbox[rank, first, column], dst=owner, signal=arrived[rank, chunk], impl="lsu")
                with T.Scale("device"):  # what this device sends is sent, whoever waits below
                    pass
            with T.Scale("block"), T.Scale("device") as (rank, _):
                rows, own = T.alloc((high, wide), "int32", level="l0"), T.alloc((high,), "int32", level="l1")
                which = T.alloc((high, copies), "int32", level="l1")
                source, first, column = (rank + size - turn) % size, tile * high, part * wide
                chunk = T.ceildiv(most, high * CHUNKS)
                if first < received[source]:
                    load_places(which, places, received, source, first, most)
                    if source == rank:
                        load_rows(rows, own, X, order, rank, first, column, most)
                    else:
                        tiles = tiles_in(tile // chunk, chunk, received[source], high)
                        T.wait(arrived[source, tile // chunk], ">=", tiles * parts)
                        for i, j in T.Parallel(high, wide):
                            rows[i, j] = inbox[source, T.min(first + i, most - 1), column + j]
                    for c in T.serial(copies):
                        for i, j in T.Parallel(high, wide):
                            if which[i, c] >= 0:
                                R[which[i, c], column + j] = rows[i, j]

    return scatter_rows


def sum_program(size: int, width: int, copies: int, dtype: str, unit: int, weighted: bool) -> Any:
    """Out[t] = sum over ranks, rounded, of the sum of W[p] Y[p] over the places p of what came from row t."""
    room, most = T.dynamic("room"), T.dynamic("most")
    wide = piece(width, unit)
    high, parts = tile_rows(wide), width // wide

    @T.prim_func
    def sum_rows(
        Y: T.Tensor((room, width), dtype),
        W: T.Tensor((room if weighted else 1,), "float32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, copies), "int32"),
        inbox: T.Tensor((size, most, width), dtype),  # by source
        before: T.Tensor((most + 1, size), "int32"),
        Out: T.Tensor((most, width), dtype),
    ):
        with T.Kernel(device=size, block=(T.ceildiv(most, high), parts, size), threads=THREADS) as (tile, part, turn):
            arrived = T.alloc_flags((size, CHUNKS))
            T.assume(most >= 1)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                total, rows = T.alloc((high, wide), "float32", level="l0"), T.alloc((high, wide), dtype, level="l0")
                which, share = (T.alloc((high, copies), kind, level="l1") for kind in ("int32", "float32"))
                home, first, column = (rank + 1 + turn) % size, tile * high, part * wide
                chunk = tile // T.ceildiv(most, high * CHUNKS)
                if first < received[home]:
                    load_places(which, places, received, home, first, most)
                    if weighted:
                        for i, c in T.Parallel(high, copies):
                            share[i, c] = T.if_then_else(which[i, c] >= 0, W[T.max(which[i, c], 0)], 0)
                    T.clear(total)
                    for c in T.serial(copies):
                        for i, j in T.Parallel(high, wide):
                            term = T.cast(Y[T.max(which[i, c], 0), column + j], "float32")
                            total[i, j] += T.if_then_else(which[i, c] >= 0, term * share[i, c] if weighted else term, 0)
                    T.copy(total, rows)
                    if size > 1:
                        T.copy(rows, inbox[rank, first, column], dst=home, signal=arrived[rank, chunk], impl="lsu")
                    else:
                        T.copy(rows, inbox[rank, first, column])
                        T.signal(arrived[rank, chunk])
            with T.Scale("device"):  # what this device sends is sent, whoever waits below
                pass
            with T.Scale("block"), T.Scale("device"):
                total, lines = T.alloc((high, wide), "float32", level="l0"), T.alloc((high,), "int32", level="l1")
                first, column = tile * high, part * wide
                last, chunk = T.min(first + high, most), T.ceildiv(most, high * CHUNKS)
                if turn == 0:
                    T.clear(total)
                    for source in T.serial(size):
                        for i in T.Parallel(high):
                            row = T.min(first + i, most - 1)
                            slot = before[row, source]
                            lines[i] = T.if_then_else(before[row + 1, source] > slot, slot, -1)
                        begin, end = before[first, source], before[last, source]
                        for c in T.serial(begin // (high * chunk), T.ceildiv(end, high * chunk)):
                            tiles = tiles_in(c, chunk, before[most, source], high)
                            T.wait(arrived[source, c], ">=", tiles * parts)
                        for i, j in T.Parallel(high, wide):
                            term = T.cast(inbox[source, T.max(lines[i], 0), column + j], "float32")
                            total[i, j] += T.if_then_else(lines[i] >= 0, term, 0)
                    for i, j in T.Parallel(high, wide):
                        if first + i < most:
                            Out[first + i, column + j] = total[i, j]

    return sum_rows
