# SPDX-License-Identifier: MIT
"""A layer of experts for few tokens: every rank receives all tokens, and one grid makes tables and rows of them.

The throughput form exchanges choices, makes tables of them, and then sends each token where the tables say: three grids
one after the other, whose latency is most of their time for few tokens. Here tokens leave together with the choices, to
every rank, as in an all-gather, and their slot in its inbox is their number. A receiving block waits for the choices of
all ranks, counts those ahead of its own tokens, and writes these to the rows of their experts as soon as they are
there. Sums return by the same slots.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.expert_float8 import sum_groups
from tilescale.ops.expert_programs import LayerForm
from tilescale.ops.few_rows_gemm import ROWS, few_gated_grid, few_grid
from tilescale.ops.float8_wire import GROUP, quantize
from tilescale.ops.moe_tables import ALIGN
from tilescale.ops.persistent import iterations_of
from tilescale.ops.row_exchange import CHUNKS, tiles_in
from tilescale.program.wire import WIRE, last_of

HIGH, THREADS = 16, 128
"""Groups of 128 numbers that a block moves at once, and its threads: few tokens are many blocks."""

COUNTED = 4 * THREADS
"""Choices that a block counts at once: several loads of each thread are in flight."""

RESIDENT = 6
"""Blocks that an SM has registers for."""


def padded(numbers: int) -> int:
    """`numbers` choices, rounded up to whole messages."""
    return -(-numbers // THREADS) * THREADS


@T.macro
def send_choices(chosen, shares, in_chosen, in_shares, known, tile, blocks, rank):
    """Send the choices of this rank and their weights to all ranks: the blocks of a grid share the messages."""
    numbers, size = chosen.shape[0], int(in_chosen.shape[0])
    number, share = (T.alloc((THREADS,), kind, level="l0") for kind in ("int32", "float32"))
    for iteration in T.serial(iterations_of(tile, blocks, T.ceildiv(numbers, THREADS))):
        begin = (tile + iteration * blocks) * THREADS
        for i in T.Parallel(THREADS):
            number[i] = T.cast(chosen[T.min(begin + i, numbers - 1)], "int32")
            share[i] = shares[T.min(begin + i, numbers - 1)]
        for other in T.serial(size):
            T.copy(share, in_shares[rank, begin], dst=other)
            T.copy(number, in_chosen[rank, begin], dst=other)
        for other in T.serial(size):
            T.signal(known[rank], dst=other)


@T.macro
def send_groups(X, of_X, inbox, in_scales, arrived, first, flag, rank):
    """Send consecutive groups of tokens to all ranks, in float8 if the inbox is."""
    size, groups = int(inbox.shape[0]), X.shape[0]
    given = T.alloc((HIGH, GROUP), X.dtype, level="l0")
    for i, j in T.Parallel(HIGH, GROUP):
        given[i, j] = X[T.min(first + i, groups - 1), j]
    if inbox.dtype == WIRE:
        scale = T.alloc((HIGH,), "float32", level="l0")
    if X.dtype == WIRE:
        for i in T.Parallel(HIGH):
            scale[i] = of_X[T.min(first + i, groups - 1)]
    elif inbox.dtype == WIRE:
        x, sizes = (T.alloc((HIGH, GROUP), kind, level="l0") for kind in ("float32", "int32"))
        top, q = T.alloc((HIGH,), "int32", level="l0"), T.alloc((HIGH, GROUP), WIRE, level="l0")
        inverse, end = (T.alloc((HIGH,), "float32", level="l0") for _ in range(2))
        for i, j in T.Parallel(HIGH, GROUP):
            x[i, j] = T.cast(given[i, j], "float32")
        quantize(x, sizes, top, scale, inverse, end, q, last_of("float32"))
    for step in T.serial(size):  # the next rank first, not all to one
        other = (rank + 1 + step) % size
        T.copy(given if X.dtype == inbox.dtype else q, inbox[rank, first, 0], dst=other)
        if inbox.dtype == WIRE:
            T.copy(scale, in_scales[rank, first], dst=other)
    for other in T.serial(size):  # one wait for the stores to all of them
        T.signal(arrived[rank, flag], dst=other)


@T.macro
def count_choices(total, ahead, begin, whole, in_chosen, numbers, rank, source, before):
    """Choices of each local expert: of all ranks, and those ahead of choice `before` of a rank. And the first row of
    each expert, with whole tiles of these GEMMs, and with those of the throughput form, which decide what is dropped.
    """
    local = int(total.shape[0])
    key = T.alloc((COUNTED,), "int32", level="l0")
    for e in T.Parallel(padded(local)):
        if e < local:
            total[e] = 0
            ahead[e] = 0
    for other in T.serial(in_chosen.shape[0]):
        for n in T.serial(T.ceildiv(numbers, COUNTED)):
            for i in T.Parallel(COUNTED):
                at = n * COUNTED + i
                key[i] = T.if_then_else(at < numbers, in_chosen[other, T.min(at, numbers - 1)] - rank * local, -1)
            for i in T.Parallel(COUNTED):
                if (key[i] >= 0) & (key[i] < local):
                    T.atomic_add(total[key[i]], 1)
                    if (other < source) | ((other == source) & (n * COUNTED + i < before)):
                        T.atomic_add(ahead[key[i]], 1)
    row, aligned = (T.alloc((padded(local),), "int32", level="l0") for _ in range(2))
    for e in T.Parallel(padded(local)):
        row[e] = 0
        aligned[e] = 0
        for other in T.serial(local):
            row[e] += T.if_then_else(other < e, T.ceildiv(total[other], ROWS) * ROWS, 0)
            aligned[e] += T.if_then_else(other < e, T.ceildiv(total[other], ALIGN) * ALIGN, 0)
        if e < local:
            begin[e] = row[e]
            whole[e] = aligned[e]


@T.macro
def write_tiles(dropped, owners, total, begin, whole, room):
    """Write the number of dropped choices of each expert, and the expert of each tile."""
    tiles, local = owners.shape[0], int(dropped.shape[0])
    for e in T.Parallel(padded(local)):
        if e < local:
            dropped[e] = total[e] - T.max(T.min(total[e], room - whole[e]), 0)
    owner = T.alloc((THREADS,), "int32", level="l0")
    for n in T.serial(T.ceildiv(tiles, THREADS)):
        for i in T.Parallel(THREADS):
            owner[i] = -1
            for e in T.serial(local):
                row = (n * THREADS + i) * ROWS - begin[e]
                owner[i] += T.if_then_else((row >= 0) & (row < total[e]), e + 1, 0)
            if n * THREADS + i < tiles:
                owners[n * THREADS + i] = owner[i]


@T.macro
def find_rows(row, near, begin, whole, ahead, in_chosen, rank, source, first, each, most, room):
    """The row of each choice of consecutive groups, -1 for none; `near`: the experts of their tokens' choices."""
    copies, local = int(row.shape[1]), int(begin.shape[0])
    span, wide = (-(-HIGH // each) + 1) * copies, padded(HIGH * copies)
    token = first // each
    for j in T.Parallel(near.shape[0]):
        near[j] = in_chosen[source, T.min(token * copies + j, most * copies - 1)] - rank * local
    mine, expert, key, place = (T.alloc((wide,), "int32", level="l0") for _ in range(4))
    for i in T.Parallel(wide):
        mine[i] = T.min((first + i // copies) // each - token, span // copies - 1) * copies + i % copies
        expert[i] = near[mine[i]]
        key[i] = T.max(T.min(expert[i], local - 1), 0)
        place[i] = ahead[key[i]]
        for j in T.serial(span):
            place[i] += T.if_then_else((j < mine[i]) & (near[j] == expert[i]), 1, 0)
        is_row = (expert[i] == key[i]) & ((first + i // copies) // each < most) & (whole[key[i]] + place[i] < room)
        if i < HIGH * copies:
            row[i // copies, i % copies] = T.if_then_else(is_row, begin[key[i]] + place[i], -1)


@T.macro
def write_rows(R, of_R, inbox, in_scales, row, source, first, each):
    """Write consecutive groups of a rank's tokens to their rows, and the scale of each in a column of `of_R`."""
    groups = inbox.shape[1]
    come = T.alloc((HIGH, GROUP), inbox.dtype, level="l0")
    for i, j in T.Parallel(HIGH, GROUP):
        come[i, j] = inbox[source, T.min(first + i, groups - 1), j]
    for i, j in T.Parallel(HIGH, GROUP):
        for c in [*range(int(row.shape[1]))]:
            if row[i, c] >= 0:
                R[row[i, c], (first + i) % each * GROUP + j] = come[i, j]
    if inbox.dtype == WIRE:
        for i in T.Parallel(HIGH):
            for c in [*range(int(row.shape[1]))]:
                if row[i, c] >= 0:
                    of_R[(first + i) % each, row[i, c]] = in_scales[source, T.min(first + i, groups - 1)]


@T.macro
def dispatch_grid(X, of_X, chosen, shares, in_chosen, in_shares, inbox, in_scales, tables, R, of_R):
    """R[places[s, t]] = X[t] of rank s, in float8 if R is; and the other tables of the GEMMs."""
    dropped, owners, places = tables
    size, groups, copies, local = int(inbox.shape[0]), inbox.shape[1], int(places.shape[2]), int(dropped.shape[0])
    numbers, most, each = chosen.shape[0], places.shape[1], int(R.shape[1]) // GROUP
    span = padded((-(-HIGH // each) + 1) * copies)  # choices of the tokens of consecutive groups
    with T.Kernel(device=size, block=(T.ceildiv(groups, HIGH), 2 + size), threads=THREADS) as (tile, z):
        known, arrived = T.alloc_flags((size,)), T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        T.assume(groups >= 1)
        T.assume(numbers >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            T.annotate_min_blocks_per_sm(RESIDENT)
            blocks, first = T.ceildiv(groups, HIGH), tile * HIGH
            chunk = T.ceildiv(blocks, CHUNKS)  # tiles that share a flag
            if z == 0:
                send_choices(chosen, shares, in_chosen, in_shares, known, tile, blocks, rank)
            elif z == 1:
                send_groups(X, of_X, inbox, in_scales, arrived, first, tile // chunk, rank)
            else:
                source = (rank + size + 2 - z) % size
                total, ahead, begin, whole = (T.alloc((local,), "int32", level="l1") for _ in range(4))
                near = T.alloc((span,), "int32", level="l1")
                row = T.alloc((HIGH, copies), "int32", level="l1")
                T.wait(known[0:size], ">=", T.ceildiv(numbers, THREADS))
                count_choices(total, ahead, begin, whole, in_chosen, numbers, rank, source, first // each * copies)
                find_rows(row, near, begin, whole, ahead, in_chosen, rank, source, first, each, most, R.shape[0])
                for i, c in T.Parallel(HIGH, copies):
                    if ((first + i) % each == 0) & ((first + i) // each < most):
                        places[source, (first + i) // each, c] = row[i, c]
                if (tile == 0) & (z == 2):
                    write_tiles(dropped, owners, total, begin, whole, R.shape[0])
                T.wait(arrived[source, tile // chunk], ">=", tiles_in(tile // chunk, chunk, groups, HIGH))
                write_rows(R, of_R, inbox, in_scales, row, source, first, each)


@T.macro
def combine_grid(Y, in_shares, places, inbox, Out):
    """Out[t] = the sum over ranks, rounded, of the sum of w Y[p] over the rows p of token t there."""
    size, groups, copies = int(inbox.shape[0]), inbox.shape[1], int(places.shape[2])
    most, each = places.shape[1], int(Y.shape[1]) // GROUP
    with T.Kernel(device=size, block=(T.ceildiv(groups, HIGH), size), threads=THREADS) as (tile, z):
        arrived = T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        T.assume(groups >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            T.annotate_min_blocks_per_sm(RESIDENT)
            chunk, first = T.ceildiv(T.ceildiv(groups, HIGH), CHUNKS), tile * HIGH
            total, rounded = T.alloc((HIGH, GROUP), "float32", level="l0"), T.alloc((HIGH, GROUP), Y.dtype, level="l0")
            which, share = (T.alloc((HIGH, copies), kind, level="l1") for kind in ("int32", "float32"))
            home = (rank + 1 + z) % size
            for i, c in T.Parallel(HIGH, copies):
                token = T.min((first + i) // each, most - 1)
                which[i, c] = places[home, token, c]
                share[i, c] = T.if_then_else(places[home, token, c] >= 0, in_shares[home, token * copies + c], 0)
            sum_groups(total, Y, which, share, first, each)
            T.copy(total, rounded)
            if z < size - 1:
                T.copy(rounded, inbox[rank, first, 0], dst=home, signal=arrived[rank, tile // chunk])
            else:
                for step in T.serial(1, size):
                    source = (rank + size - step) % size
                    T.wait(arrived[source, tile // chunk], ">=", tiles_in(tile // chunk, chunk, groups, HIGH))
                T.clear(total)
                for source in T.unroll(size):
                    for i, j in T.Parallel(HIGH, GROUP):
                        far = inbox[source, T.min(first + i, groups - 1), j]
                        total[i, j] += T.cast(T.if_then_else(source == rank, rounded[i, j], far), "float32")
                for i, j in T.Parallel(HIGH, GROUP):
                    if first + i < groups:
                        Out[first + i, j] = total[i, j]


def low_latency_program(
    size: int, local: int, choices: int, features: int, inner: int, kind: str, form: LayerForm, blocks: int
) -> Any:
    """The forward of a layer for few tokens. `kind`: the type of choices. `blocks`: of the persistent grids."""
    numbers, sent, most, groups = (T.dynamic(name) for name in ("numbers", "sent", "most", "groups"))
    room, tiles = T.dynamic("room"), T.dynamic("tiles")
    dtype, given = form.dtype, form.weights

    @T.prim_func
    def moe_layer_low_latency(
        X: T.Tensor((groups, GROUP), WIRE if form.quantized else dtype),
        of_X: T.Tensor((groups,) if form.quantized else (1,), "float32"),
        chosen: T.Tensor((numbers,), kind),
        shares: T.Tensor((numbers,), "float32"),
        gate_up: T.Tensor((local, 2 * inner, features), given),
        of_gate_up: T.Tensor(form.scales(local, 2 * inner, features), "float32"),
        down: T.Tensor((local, features, inner), given),
        of_down: T.Tensor(form.scales(local, features, inner), "float32"),
        in_chosen: T.Tensor((size, sent), "int32"),
        in_shares: T.Tensor((size, sent), "float32"),
        in_rows: T.Tensor((size, groups, GROUP), given),
        in_scales: T.Tensor(form.shape(size, groups), "float32"),
        in_sums: T.Tensor((size, groups, GROUP), dtype),
        dropped: T.Tensor((local,), "int32"),
        owners: T.Tensor((tiles,), "int32"),
        places: T.Tensor((size, most, choices), "int32"),
        rows: T.Tensor((room, features), given),
        of_rows: T.Tensor(form.shape(features // GROUP, room), "float32"),
        active: T.Tensor((room, inner), given),
        of_active: T.Tensor(form.shape(inner // GROUP, room), "float32"),
        made: T.Tensor((room, features), dtype),
        Y: T.Tensor((groups, GROUP), dtype),
    ):
        tables = dropped, owners, places
        dispatch_grid(X, of_X, chosen, shares, in_chosen, in_shares, in_rows, in_scales, tables, rows, of_rows)
        few_gated_grid(rows, of_rows, gate_up, of_gate_up, owners, active, of_active, size, blocks)
        few_grid(active, of_active, down, of_down, owners, made, size, blocks)
        combine_grid(made, in_shares, places, in_sums, Y)

    return moe_layer_low_latency
