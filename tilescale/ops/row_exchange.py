# SPDX-License-Identifier: MIT
"""Table-driven exchange of rows, and sums of processed rows: unequal exchanges, and those of experts.

Blocks move the rows, as their indices are device-side. The first blocks of a grid only send, one tile after the other,
into the inboxes of others, and raise a flag after each; the blocks after them receive, local rows first. So networks
and memory are busy at the same time, and waiting blocks hold up no sender.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.persistent import iterations_of_first
from tilescale.ops.workspace import workspace_of

THREADS = 256

TILE, PIECE = 8192, 4096
"""Words that one block moves at once, and of one row, at most: eight times 16 bytes in flight for each thread."""

SUMMED, SUMMED_PIECE = 4096, 2048
"""The same for elements that are summed: for each thread twice 16 bytes of all copies are in flight, or as many as a
row's divisors allow. Measured on two H200, 4096 rows of 7168: 225 us, with half as many 230."""

SENDERS, SUMMING_SENDERS = 128, 256
"""Blocks that send rows, and that send sums: enough to fill the network; the other blocks get the rest."""

RESIDENT, SUMMING_RESIDENT = 3, 4
"""Resident blocks of both kinds on an SM: their concurrent loads hide the latency."""

MANY_ROWS = 64
"""Rows of a tile, at least, where the threads do not share it evenly."""

CHUNKS = 256
"""Flags for the chunks that one rank sends to another one."""

UNIT_BYTES = 16
"""Rows are a multiple of this number of bytes: a thread's load or store."""


def scatter_rows(x: torch.Tensor, order: torch.Tensor, sent: torch.Tensor, arriving: tuple, team: Team) -> torch.Tensor:
    """Rows of all ranks, where tables say.

    Args:
        x: (rows, bytes), uint8, as many on all ranks, contiguous; a row is a multiple of `UNIT_BYTES`.
        order: (ranks, most), int32: this rank's rows that go to each rank, one slot after the other. `most` is what any
            rank sends to any other at most, the same on all ranks.
        sent: (ranks,), int32: how many they are.
        arriving: how many come from each rank, (ranks,), int32; the rows of the result that each of them becomes,
            (ranks, most, copies), int32, -1 for none; and how many rows the result has.
        team: the participating ranks.

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
    """Sum the processed rows of `scatter_rows` on the ranks that they came from.

    Each rank sums the copies of a row, times their weights, in float32 and in their order; and rounds. Where the row
    came from, the sums of the ranks are added up in float32, in the order of ranks.

    Args:
        y: (rows, width), contiguous; a row is a multiple of `UNIT_BYTES`.
        weights: (rows,), float32, or None for ones.
        arriving: as for `scatter_rows`.
        before: (most + 1, ranks), int32: how many rows before each own one went to each rank.
        team: the participating ranks.

    Returns:
        (most, width).
    """
    received, places, _ = arriving
    width, most = y.shape[1], before.shape[0] - 1
    (inbox,) = workspace_of(team).symmetric(y.dtype, (team.size, most, width))
    result = y.new_empty(most, width)
    given = y.new_empty(1, dtype=torch.float32) if weights is None else weights
    unit = UNIT_BYTES // y.itemsize
    made = kernel(sum_program, team, width, places.shape[2], dtype_of(y), unit, weights is not None)
    made(y, given, received, places, inbox, before, result, sharers(width, unit, most))
    return result


def sharers(width: int, unit: int, most: int) -> int:
    """Blocks among which the parts of a tile of whole rows are shared out: few rows go to as many as can send."""
    high, wide = tile_of(width, unit, SUMMED, SUMMED_PIECE)
    return max(1, min(width // wide, SUMMING_SENDERS // max(-(-most // high), 1)))


def tile_of(width: int, unit: int, elements: int, most: int) -> tuple[int, int]:
    """Rows and columns of a tile: of the largest divisor of `width` that is a multiple of `unit` and at most `most`.

    TileLang lays out no tile of a few rows that its threads cannot share evenly; it does if there are many rows.
    """

    def high(n: int) -> int:
        return min(1 << (elements // n).bit_length() - 1, THREADS)

    def fits(n: int) -> bool:
        return high(n) >= MANY_ROWS or n // unit * high(n) % THREADS == 0

    wide = next(n for n in range(min(width, most), 0, -1) if width % n == 0 and n % unit == 0 and fits(n))
    return high(wide), wide


def tiles_in(number: Any, chunk: Any, rows: Any, high: int) -> Any:
    """Tiles of chunk `number` of `rows` rows."""
    return T.min(chunk, T.ceildiv(rows, high) - number * chunk)


@T.macro
def load_rows(rows, which, X, order, owner, first, column, most):
    """Load a tile of the rows that go to a rank; rows beyond the last repeat a valid one."""
    for i in T.Parallel(rows.shape[0]):
        which[i] = order[owner, T.min(first + i, most - 1)]
    for i, j in T.Parallel(rows.shape[0], rows.shape[1]):
        rows[i, j] = X[which[i], column + j]


@T.macro
def load_places(which, places, received, source, first, most):
    """The places of a tile of rows from a rank; -1 for a row beyond the last one."""
    for i, c in T.Parallel(which.shape[0], which.shape[1]):
        place = places[source, T.min(first + i, most - 1), c]
        which[i, c] = T.if_then_else(first + i < received[source], place, -1)


@T.macro
def load_shares(share, which, W):
    """The weights of places; 0 where there is none."""
    for i, c in T.Parallel(which.shape[0], which.shape[1]):
        share[i, c] = T.if_then_else(which[i, c] >= 0, W[T.max(which[i, c], 0)], 0)


@T.macro
def sum_copies(total, rows, Y, which, share, column, weighted):
    """A tile of the sums of copies, rounded: loads of all copies are in flight at once."""
    T.clear(total)
    for c in T.unroll(which.shape[1]):
        for i, j in T.Parallel(total.shape[0], total.shape[1]):
            value = T.if_then_else(which[i, c] >= 0, Y[which[i, c], column + j], T.cast(0, Y.dtype))
            total[i, j] += T.cast(value, "float32") * share[i, c] if weighted else T.cast(value, "float32")
    T.copy(total, rows)


@T.macro
def scatter_grid(X, order, sent, inbox, received, places, R, unit):
    """R[places[s, i]] = X[order[s][i]] of rank s; `unit`: elements that a thread loads at once."""
    size, most, width, copies = int(inbox.shape[0]), inbox.shape[1], int(inbox.shape[2]), int(places.shape[2])
    high, wide = tile_of(width, unit, TILE * unit // 4, PIECE * unit // 4)
    parts = width // wide
    with T.Kernel(device=size, block=(T.ceildiv(most, high), parts, 1 + size), threads=THREADS) as (tile, part, z):
        arrived = T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            rows, own = T.alloc((high, wide), X.dtype, level="l0"), T.alloc((high,), "int32", level="l1")
            which = T.alloc((high, copies), "int32", level="l1")
            T.annotate_min_blocks_per_sm(RESIDENT)
            chunk = T.ceildiv(most, high * CHUNKS)  # tiles that share a flag
            if size > 1:
                if z == 0:
                    pieces = T.ceildiv(most, high) * parts
                    sender, senders = tile * parts + part, T.min(SENDERS, pieces)
                    for iteration in T.serial(iterations_of_first(sender, senders, (size - 1) * pieces)):
                        number = sender + iteration * senders
                        owner, first = (rank + 1 + number // pieces) % size, number % pieces // parts * high
                        column, flag = number % parts * wide, first // (chunk * high)
                        if first < sent[owner]:
                            load_rows(rows, own, X, order, owner, first, column, most)
                            place = inbox[rank, first, column]
                            T.copy(rows, place, dst=owner, signal=arrived[rank, flag], impl="lsu")
            if z > 0:
                source, first, column = (rank + 1 + size - z) % size, tile * high, part * wide
                if first < received[source]:
                    load_places(which, places, received, source, first, most)
                    if source == rank:
                        load_rows(rows, own, X, order, rank, first, column, most)
                    else:
                        flag = tile // chunk
                        T.wait(arrived[source, flag], ">=", tiles_in(flag, chunk, received[source], high) * parts)
                        for i, j in T.Parallel(high, wide):
                            rows[i, j] = inbox[source, T.min(first + i, most - 1), column + j]
                    for i, j in T.Parallel(high, wide):  # one statement: its stores have no order to keep
                        for c in [*range(copies)]:
                            if which[i, c] >= 0:
                                R[which[i, c], column + j] = rows[i, j]


def scatter_program(size: int, width: int, copies: int) -> Any:
    """`scatter_grid` of rows of `width` words."""
    given, most, room = T.dynamic("given"), T.dynamic("most"), T.dynamic("room")

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
        scatter_grid(X, order, sent, inbox, received, places, R, UNIT_BYTES // 4)

    return scatter_rows


@T.macro
def sum_grid(Y, W, received, places, inbox, before, Out, groups, unit, weighted):
    """Out[t] = sum over ranks, rounded, of the sum of W[p] Y[p] over the places p of what came from row t.

    `groups` is what `sharers` says. As an expression of `most` it would be in every index, and lowering would take half
    as long again.
    """
    size, most, width, copies = int(inbox.shape[0]), inbox.shape[1], int(inbox.shape[2]), int(places.shape[2])
    dtype = Y.dtype
    high, wide = tile_of(width, unit, SUMMED, SUMMED_PIECE)
    parts = width // wide
    with T.Kernel(device=size, block=(T.ceildiv(most, high), groups, 2), threads=THREADS) as (tile, group, z):
        arrived = T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            total, rows = T.alloc((high, wide), "float32", level="l0"), T.alloc((high, wide), dtype, level="l0")
            which, share = (T.alloc((high, copies), kind, level="l1") for kind in ("int32", "float32"))
            lines = T.alloc((size, high), "int32", level="l1")
            T.annotate_min_blocks_per_sm(SUMMING_RESIDENT)
            first, begin, end = (T.alloc_var("int32") for _ in range(3))  # short indices take less time
            chunk, each = T.ceildiv(most, high * CHUNKS), T.ceildiv(parts, groups)
            if size > 1:
                if z == 0:
                    pieces, home = T.ceildiv(most, high) * groups, T.alloc_var("int32")
                    sender, senders = tile * groups + group, T.min(SUMMING_SENDERS, pieces)
                    for iteration in T.serial(iterations_of_first(sender, senders, (size - 1) * pieces)):
                        number = sender + iteration * senders
                        home, first = (rank + 1 + number // pieces) % size, number % pieces // groups * high
                        begin = number % groups * each
                        end = T.min(begin + each, parts)
                        if first < received[home]:
                            load_places(which, places, received, home, first, most)
                            if weighted:
                                load_shares(share, which, W)
                            for part in T.serial(begin, end):
                                sum_copies(total, rows, Y, which, share, part * wide, weighted)
                                T.copy(rows, inbox[rank, first, part * wide], dst=home, impl="lsu")
                            T.signal(arrived[rank, first // (chunk * high)], dst=home)
            if z > 0:
                first, begin = tile * high, group * each
                end = T.min(begin + each, parts)
                for s, i in T.Parallel(size, high):
                    row = T.min(first + i, most - 1)
                    slot = before[row, s]
                    lines[s, i] = T.if_then_else((s != rank) & (before[row + 1, s] > slot), slot, -1)
                for i, c in T.Parallel(high, copies):
                    row = T.min(first + i, most - 1)
                    slot = before[row, rank]
                    which[i, c] = T.if_then_else(before[row + 1, rank] > slot, places[rank, slot, c], -1)
                if weighted:
                    load_shares(share, which, W)
                T.sync_threads()  # the tables are there, also where nothing is waited for
                for part in T.serial(begin, end):
                    sum_copies(total, rows, Y, which, share, part * wide, weighted)
                    if part == begin:  # this rank's sum takes the time in which others arrive
                        for step in T.serial(1, size):
                            source = (rank + size - step) % size
                            here, there = before[first, source], before[T.min(first + high, most), source]
                            for c in T.serial(here // (high * chunk), T.ceildiv(there, high * chunk)):
                                T.wait(
                                    arrived[source, c], ">=", tiles_in(c, chunk, before[most, source], high) * groups
                                )
                    T.clear(total)
                    for source in T.unroll(size):
                        for i, j in T.Parallel(high, wide):
                            far = inbox[source, lines[source, i], part * wide + j]
                            value = T.if_then_else(lines[source, i] >= 0, far, T.cast(0, dtype))
                            total[i, j] += T.cast(T.if_then_else(source == rank, rows[i, j], value), "float32")
                    for i, j in T.Parallel(high, wide):
                        if first + i < most:
                            Out[first + i, part * wide + j] = total[i, j]


def sum_program(size: int, width: int, copies: int, dtype: str, unit: int, weighted: bool) -> Any:
    """`sum_grid` of rows of `width` elements."""
    room, most = T.dynamic("room"), T.dynamic("most")

    @T.prim_func
    def sum_rows(
        Y: T.Tensor((room, width), dtype),
        W: T.Tensor((room if weighted else 1,), "float32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, copies), "int32"),
        inbox: T.Tensor((size, most, width), dtype),  # by source
        before: T.Tensor((most + 1, size), "int32"),
        Out: T.Tensor((most, width), dtype),
        groups: T.int32,
    ):
        sum_grid(Y, W, received, places, inbox, before, Out, groups, unit, weighted)

    return sum_rows
