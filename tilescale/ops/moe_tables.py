# SPDX-License-Identifier: MIT
"""Mixture of experts: the routing tables, from the experts that the tokens of all ranks chose.

Choices are handled in chunks. A first grid sends every chunk to all ranks, and counts in each chunk the choices of each
local expert. A second grid sums the counts of the chunks before its own, which gives the row of each choice. The host
reads nothing, and rows of an expert are in the order of ranks, tokens and choices.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.ops.arguments import dense
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.workspace import workspace_of

ALIGN = 128
"""Rows of each expert begin at a multiple of this number: a tile of a GEMM has rows of one expert."""

DROPPED = 2
"""The number of `dropped` among the tables."""

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""

CHUNK = 256
"""Choices of a chunk, at most, and threads of a block: each has one choice."""


def tokens_of(choices: int) -> int:
    """Tokens of a chunk."""
    return max(1, CHUNK // choices)


def made_tables(
    chosen: torch.Tensor, weights: torch.Tensor | None, local: int, most: int, room: int, team: Team
) -> list[torch.Tensor]:
    """The tensors of a Routing, in its order, with `weights` even where none are given.

    Args:
        chosen: (tokens, choices), int32 or int64.
        weights: like it, or None: then the weights of rows are zeros.
        local: experts of a rank.
        most: tokens of a rank, at most.
        room: rows, a multiple of ALIGN.
        team: the participating ranks.
    """
    size, choices = team.size, chosen.shape[1]
    made, (counts, kind) = new_tables(chosen, size, local, most, room), form_of_counts(size, local, most, choices)
    counted = chosen.new_empty(counts, dtype=kind)
    shape = arriving_choices(size, most, choices)
    in_chosen, in_weights = workspace_of(team).symmetric(torch.int32, shape, shape)
    numbers = padded_choices(chosen, most, -1)
    shares = counted.new_empty(1, dtype=torch.float32) if weights is None else padded_choices(weights.float(), most, 0)
    kernel(tables_program, team, local, choices, dtype_of(numbers), weights is not None)(
        numbers, shares, in_chosen, in_weights.view(torch.float32), counted, *made
    )
    return made


def arriving_choices(size: int, most: int, choices: int) -> tuple[int, int, int]:
    """The shape of all ranks' choices: ranks, chunks, choices of a chunk."""
    return size, chunks_of(most, choices), whole(choices)


def form_of_counts(size: int, local: int, most: int, choices: int) -> Form:
    """Shape and type of the counts of each chunk."""
    return (size * chunks_of(most, choices), local + 2), torch.int32


def chunks_of(most: int, choices: int) -> int:
    """Chunks of a rank's choices."""
    return -(-most // tokens_of(choices))


def padded_choices(x: torch.Tensor, rows: int, value: int) -> torch.Tensor:
    """The numbers of a matrix of choices, with further rows of `value`."""
    missing = rows - x.shape[0]
    return (torch.nn.functional.pad(x, (0, 0, 0, missing), value=value) if missing else dense(x)).view(-1)


def forms_of_tables(size: int, local: int, most: int, room: int, choices: int) -> list[Form]:
    """Shapes and types of the tables."""
    shapes = (local,), (local,), (room // ALIGN,), (size, most), (size,), (size,), (size, most, choices)
    return [((room,), torch.float32), *((shape, torch.int32) for shape in (*shapes, (most + 1, size), (1,)))]


def new_tables(like: torch.Tensor, size: int, local: int, most: int, room: int) -> list[torch.Tensor]:
    """Uninitialized tables, on the device of the choices `like`."""
    forms = forms_of_tables(size, local, most, room, like.shape[1])
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in forms]


def returned(
    grads: torch.Tensor, received: torch.Tensor, places: torch.Tensor, before: torch.Tensor, team: Team
) -> torch.Tensor:
    """For each local choice the sum of the numbers of its row, on any rank.

    Args:
        grads: (n, room), float32: n numbers of each row.
        received, places, before: of a Routing.
        team: the participating ranks.

    Returns:
        (most, choices), float32; 0 for choices that have no row.
    """
    size, most, choices = places.shape
    result = grads.new_empty(most, choices)
    (inbox,) = workspace_of(team).symmetric(torch.float32, arriving_choices(size, most, choices))
    kernel(returns_program, team, choices)(dense(grads), received, places, before, inbox, result)
    return result


def whole(numbers: int) -> int:
    """`numbers` rounded up to a multiple that the threads of a block share evenly."""
    return -(-numbers // CHUNK) * CHUNK


@T.macro
def load_chunk(numbers, chosen, chunk, span):
    """The choices of a local chunk; beyond its last one, none."""
    count = chosen.shape[0]
    for i in T.Parallel(numbers.shape[0]):
        at = chunk * span + i
        is_there = (i < span) & (at < count)
        numbers[i] = T.if_then_else(is_there, T.cast(chosen[T.min(at, count - 1)], "int32"), -1)


@T.macro
def send_weights(share, shares, in_weights, chunk, span, rank, home):
    """A chunk's weights, in front of its choices."""
    for i in T.Parallel(share.shape[0]):
        share[i] = shares[T.min(chunk * span + i, shares.shape[0] - 1)]
    T.copy(share, in_weights[rank, chunk, 0], dst=home)


@T.macro
def find_keys(near, far, comes, goes, in_chosen, chosen, rank, other, chunk, local, choices):
    """The local expert here of each choice of a chunk from a rank, or -1, and there of each local choice.

    `comes` and `goes` mark the first of a token's choices that has one.
    """
    span, count = tokens_of(choices) * choices, chosen.shape[0]
    for i in T.Parallel(near.shape[0]):
        here = in_chosen[other, chunk, i] - rank * local
        near[i] = T.if_then_else((here >= 0) & (here < local), here, -1)
        at = chunk * span + i
        there = T.cast(chosen[T.min(at, count - 1)], "int32") - other * local
        far[i] = T.if_then_else((i < span) & (at < count) & (there >= 0) & (there < local), there, -1)
    ahead_near, ahead_far = (T.alloc((near.shape[0],), "int32", level="l0") for _ in range(2))
    for i in T.Parallel(near.shape[0]):
        ahead_near[i] = 0
        ahead_far[i] = 0
        for c in T.serial(1, choices):
            j = T.max(i - c, 0)
            ahead_near[i] += T.if_then_else((c <= i % choices) & (near[j] >= 0), 1, 0)
            ahead_far[i] += T.if_then_else((c <= i % choices) & (far[j] >= 0), 1, 0)
        comes[i] = T.if_then_else((near[i] >= 0) & (ahead_near[i] == 0), 1, 0)
        goes[i] = T.if_then_else((far[i] >= 0) & (ahead_far[i] == 0), 1, 0)


@T.macro
def count_keys(counted, found, near, comes, goes, number, live, local):
    """Count the choices of each local expert in a chunk, and the received and sent tokens."""
    for e in T.Parallel(found.shape[0]):
        found[e] = 0
        for j in T.serial(live):
            token = T.if_then_else(e == local, comes[j], goes[j])
            found[e] += T.if_then_else(e < local, T.if_then_else(near[j] == e, 1, 0), token)
        if e < local + 2:
            counted[number, e] = found[e]


@T.macro
def sum_counts(total, ahead, begin, counted, first, me, end, local):
    """Sums over all chunks, and over those before chunk `me`; of tokens, over the chunks of one rank. And the first row
    of each expert."""
    keys, count = local + 2, counted.shape[0]
    parts = max(1, CHUNK // keys)
    width = whole(parts * keys)
    part_sums, part_ahead = (T.alloc((width,), "int32", level="l1") for _ in range(2))
    sums, sums_ahead = (T.alloc((width,), "int32", level="l0") for _ in range(2))
    for i in T.Parallel(width):
        sums[i] = 0
        sums_ahead[i] = 0
        for n in T.serial(T.ceildiv(count, parts)):
            number, key = n * parts + i // keys, i % keys
            is_counted = (key < local) | ((number >= first) & (number < end))
            if (i < parts * keys) & (number < count) & is_counted:
                sums[i] += counted[number, key]
                sums_ahead[i] += T.if_then_else(number < me, counted[number, key], 0)
        part_sums[i] = sums[i]
        part_ahead[i] = sums_ahead[i]
    for i in T.Parallel(width):
        sums[i] = 0
        sums_ahead[i] = 0
        for part in T.serial(parts):
            sums[i] += part_sums[part * keys + i % keys]
            sums_ahead[i] += part_ahead[part * keys + i % keys]
        if i < keys:
            total[i] = sums[i]
            ahead[i] = sums_ahead[i]
    for i in T.Parallel(width):
        sums[i] = 0
        for e in T.serial(local):
            sums[i] += T.if_then_else(e < i, T.ceildiv(total[e], ALIGN) * ALIGN, 0)
        if i < local:
            begin[i] = sums[i]


@T.macro
def clear_part(W, places, order, source, chunk, chunks):
    """Clear the entries that no choice writes later: rows without a choice, choices without a row, slots without a
    token."""
    room, size, most, choices = W.shape[0], int(places.shape[0]), places.shape[1], int(places.shape[2])
    tokens, share = tokens_of(choices), T.alloc_var("int32")
    share = T.ceildiv(room, size * chunks * CHUNK)
    for i in T.Parallel(whole(choices)):
        for n in T.serial(share):
            row = ((source * chunks + chunk) * share + n) * CHUNK + i
            if (i < CHUNK) & (row < room):
                W[row] = 0
        token = chunk * tokens + i // choices
        if (i < tokens * choices) & (token < most):
            places[source, token, i % choices] = -1
            order[source, token] = 0


@T.macro
def place_choices(tables, near, comes, goes, ahead, begin, other, chunk, live, local, weighted):
    """The rows of a chunk's choices, and their weights; and the slots of a chunk's tokens among those that go to a
    rank."""
    places, W, in_weights, before, order = tables
    choices, width = int(places.shape[2]), near.shape[0]
    first = chunk * tokens_of(choices)
    within, slot, place = (T.alloc((width,), "int32", level="l0") for _ in range(3))
    for i in T.Parallel(width):
        within[i] = 0
        slot[i] = ahead[local]
        place[i] = ahead[local + 1]
        for j in T.serial(live):
            within[i] += T.if_then_else((j < i) & (near[j] == near[i]), 1, 0)
            slot[i] += T.if_then_else(j < i // choices * choices, comes[j], 0)
            place[i] += T.if_then_else(j < i // choices * choices, goes[j], 0)
        if near[i] >= 0:
            row = begin[near[i]] + ahead[near[i]] + within[i]
            if row < W.shape[0]:
                places[other, slot[i], i % choices] = row
                if weighted:
                    W[row] = in_weights[other, chunk, i]
        if (i < live) & (i % choices == 0):
            before[first + i // choices, other] = place[i]
        if goes[i] > 0:
            order[other, place[i]] = first + i // choices


@T.macro
def write_owners(counts, dropped, owners, used, total, begin, local):
    """Write the number of rows of each expert, the expert of each tile, and the number of tiles with rows."""
    tiles, owner = owners.shape[0], T.alloc((CHUNK,), "int32", level="l0")
    for _ in T.Parallel(1):
        used[0] = T.min(begin[local - 1] // ALIGN + T.ceildiv(total[local - 1], ALIGN), tiles)
    for e in T.Parallel(local):
        kept = T.max(T.min(total[e], tiles * ALIGN - begin[e]), 0)
        counts[e] = kept
        dropped[e] = total[e] - kept
    for n in T.serial(T.ceildiv(tiles, CHUNK)):
        for i in T.Parallel(CHUNK):
            owner[i] = -1
            for e in T.serial(local):
                row = (n * CHUNK + i) * ALIGN - begin[e]
                owner[i] += T.if_then_else((row >= 0) & (row < total[e]), e + 1, 0)
            if n * CHUNK + i < tiles:
                owners[n * CHUNK + i] = owner[i]


@T.macro
def tables_grids(chosen, shares, in_chosen, in_weights, counted, tables, weighted):
    """The tables of every rank.

    Each step is one parallel loop, with serial loops inside: TileLang's layout inference takes time in the square of
    the number of parallel loops that have buffers in common.
    """
    W, counts, dropped, owners, order, sent, received, places, before, used = tables
    size, chunks, width = int(in_chosen.shape[0]), in_chosen.shape[1], int(in_chosen.shape[2])
    numbers, most, choices = chosen.shape[0], places.shape[1], int(places.shape[2])
    tokens, local = tokens_of(choices), int(counts.shape[0])
    span, keys = tokens * choices, local + 2
    with T.Kernel(device=size, block=(chunks, 2 * size), threads=CHUNK) as (chunk, z):
        arrived = T.alloc_flags((size,))
        T.assume(numbers >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            live = T.alloc_var("int32")
            live = T.min(span, numbers - chunk * span)
            if z < size:
                given, share = (T.alloc((width,), dtype, level="l0") for dtype in ("int32", "float32"))
                home = (rank + 1 + z) % size
                load_chunk(given, chosen, chunk, span)
                if weighted:
                    send_weights(share, shares, in_weights, chunk, span, rank, home)
                T.copy(given, in_chosen[rank, chunk, 0], dst=home, signal=arrived[rank])
            else:
                near, far, comes, goes = (T.alloc((width,), "int32", level="l1") for _ in range(4))
                found = T.alloc((whole(keys),), "int32", level="l0")
                source = z - size
                clear_part(W, places, order, source, chunk, chunks)
                T.wait(arrived[source], ">=", chunks)
                find_keys(near, far, comes, goes, in_chosen, chosen, rank, source, chunk, local, choices)
                count_keys(counted, found, near, comes, goes, source * chunks + chunk, live, local)
    with T.Kernel(device=size, block=(chunks, size), threads=CHUNK) as (chunk, other):
        with T.Scale("block"), T.Scale("device") as (rank, _):
            near, far, comes, goes = (T.alloc((width,), "int32", level="l1") for _ in range(4))
            total, ahead, begin = (T.alloc((keys,), "int32", level="l1") for _ in range(3))
            live, end = (T.alloc_var("int32") for _ in range(2))
            live, end = T.min(span, numbers - chunk * span), (other + 1) * chunks
            sum_counts(total, ahead, begin, counted, end - chunks, end - chunks + chunk, end, local)
            find_keys(near, far, comes, goes, in_chosen, chosen, rank, other, chunk, local, choices)
            written = places, W, in_weights, before, order
            place_choices(written, near, comes, goes, ahead, begin, other, chunk, live, local, weighted)
            if chunk == 0:
                for _ in T.Parallel(1):
                    received[other] = total[local]
                    sent[other] = total[local + 1]
                    before[most, other] = total[local + 1]
                if other == 0:
                    write_owners(counts, dropped, owners, used, total, begin, local)


def tables_program(size: int, local: int, choices: int, kind: str, weighted: bool) -> Any:
    """`tables_grids`; `kind`: the type of choices, which may be `weighted`."""
    numbers, chunks, most = T.dynamic("numbers"), T.dynamic("chunks"), T.dynamic("most")
    room, tiles = T.dynamic("room"), T.dynamic("tiles")
    width, keys = whole(choices), local + 2

    @T.prim_func
    def moe_tables(
        chosen: T.Tensor((numbers,), kind),
        shares: T.Tensor((numbers if weighted else 1,), "float32"),
        in_chosen: T.Tensor((size, chunks, width), "int32"),  # by source
        in_weights: T.Tensor((size, chunks, width), "float32"),
        counted: T.Tensor((size * chunks, keys), "int32"),
        W: T.Tensor((room,), "float32"),
        counts: T.Tensor((local,), "int32"),
        dropped: T.Tensor((local,), "int32"),
        owners: T.Tensor((tiles,), "int32"),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, choices), "int32"),
        before: T.Tensor((most + 1, size), "int32"),
        used: T.Tensor((1,), "int32"),
    ):
        tables = W, counts, dropped, owners, order, sent, received, places, before, used
        tables_grids(chosen, shares, in_chosen, in_weights, counted, tables, weighted)

    return moe_tables


@T.macro
def returns_grid(G, received, places, before, inbox, Out):
    """Out[t, c] = the sum over n of G[n, row of choice c of token t], from the rank that has the row."""
    size, chunks, width = int(inbox.shape[0]), inbox.shape[1], int(inbox.shape[2])
    parts, most, choices = G.shape[0], places.shape[1], int(places.shape[2])
    tokens = tokens_of(choices)
    with T.Kernel(device=size, block=(chunks, size + 1), threads=CHUNK) as (chunk, z):
        arrived = T.alloc_flags((size,))
        T.assume(most >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            row = T.alloc((width,), "int32", level="l0")
            total = T.alloc((width,), "float32", level="l0")
            T.clear(total)
            if z < size:
                home = (rank + 1 + z) % size
                for i in T.Parallel(width):
                    slot = chunk * tokens + i // choices
                    has = (i < tokens * choices) & (slot < received[home])
                    row[i] = T.if_then_else(has, places[home, T.min(slot, most - 1), i % choices], -1)
                for n in T.serial(parts):
                    for i in T.Parallel(width):
                        total[i] += T.if_then_else(row[i] >= 0, G[n, T.max(row[i], 0)], 0)
                T.copy(total, inbox[rank, chunk, 0], dst=home, signal=arrived[rank])
            else:
                T.wait(arrived[0:size], ">=", chunks)
                for source in T.serial(size):
                    for i in T.Parallel(width):
                        token = T.min(chunk * tokens + i // choices, most - 1)
                        slot = before[token, source]
                        far = inbox[source, slot // tokens, slot % tokens * choices + i % choices]
                        total[i] += T.if_then_else(before[token + 1, source] > slot, far, 0)
                for i in T.Parallel(width):
                    token = chunk * tokens + i // choices
                    if (i < tokens * choices) & (token < most):
                        Out[token, i % choices] = total[i]


def returns_program(size: int, choices: int) -> Any:
    """`returns_grid`."""
    parts, room, most, chunks = T.dynamic("parts"), T.dynamic("room"), T.dynamic("most"), T.dynamic("chunks")

    @T.prim_func
    def moe_returns(
        G: T.Tensor((parts, room), "float32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, choices), "int32"),
        before: T.Tensor((most + 1, size), "int32"),
        inbox: T.Tensor((size, chunks, whole(choices)), "float32"),  # by the rank of the rows
        Out: T.Tensor((most, choices), "float32"),
    ):
        returns_grid(G, received, places, before, inbox, Out)

    return moe_returns
