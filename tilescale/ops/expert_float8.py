# SPDX-License-Identifier: MIT
"""A layer of SwiGLU experts in float8: its program, and the grid that sends tokens as float8.

Tokens are quantized on the rank that they come from, and so are the activations between both GEMMs: each 128 numbers
of a row have a scale, a power of two (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2). A scale is sent
with its numbers. Weighted sums go back as bfloat16.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.float8_wire import GROUP, WIRE, last_of, quantize
from tilescale.ops.grouped_float8 import scaled_gated_grid, scaled_grid
from tilescale.ops.moe_tables import tables_grids, whole
from tilescale.ops.persistent import turns_of_first
from tilescale.ops.row_exchange import CHUNKS, RESIDENT, SENDERS, THREADS, UNIT_BYTES, sum_grid, tiles_in

DTYPE = "bfloat16"
"""Type of tokens and results."""

HIGH = 64
"""Groups that a block moves at once: its threads keep them as float32 and as float8."""


@T.macro
def load_groups(given, x, which, X, order, owner, first, most):
    """Consecutive groups of the tokens that go to a rank; beyond the last token, those of a valid one."""
    each = int(X.shape[1]) // GROUP
    for i in T.Parallel(HIGH):
        which[i] = order[owner, T.min((first + i) // each, most - 1)]
    for i, j in T.Parallel(HIGH, GROUP):
        given[i, j] = X[which[i], (first + i) % each * GROUP + j]
    for i, j in T.Parallel(HIGH, GROUP):
        x[i, j] = T.cast(given[i, j], "float32")


@T.macro
def scatter_float8_grid(X, order, sent, inbox, in_scales, received, places, R, of_R):
    """R[places[s, i]] = X[order[s][i]] of rank s in float8, and in a column of of_R the scales of that row.

    A tile is a number of groups of consecutive tokens, not of a whole number of tokens. A rank sends its own tokens to
    itself as well, last.
    """
    size, groups, most, copies = int(in_scales.shape[0]), in_scales.shape[1], places.shape[1], int(places.shape[2])
    each = int(X.shape[1]) // GROUP
    with T.Kernel(device=size, block=(T.ceildiv(groups, HIGH), 1 + size), threads=THREADS) as (tile, z):
        arrived = T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        T.assume(groups >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            T.annotate_min_blocks_per_sm(RESIDENT)
            pieces = T.ceildiv(groups, HIGH)
            chunk = T.ceildiv(pieces, CHUNKS)  # tiles that share a flag
            if z == 0:
                given, x = (T.alloc((HIGH, GROUP), kind, level="l0") for kind in (X.dtype, "float32"))
                sizes, top = T.alloc((HIGH, GROUP), "int32", level="l0"), T.alloc((HIGH,), "int32", level="l0")
                scale, inverse, end = (T.alloc((HIGH,), "float32", level="l0") for _ in range(3))
                q = T.alloc((HIGH, GROUP), WIRE, level="l0")
                which = T.alloc((HIGH,), "int32", level="l1")
                senders = T.min(SENDERS, pieces)
                for turn in T.serial(turns_of_first(tile, senders, size * pieces)):
                    number = tile + turn * senders
                    owner, first = (T.alloc_var("int32") for _ in range(2))  # short indices take less time to lower
                    owner, first = (rank + 1 + number // pieces) % size, number % pieces * HIGH
                    if first < sent[owner] * each:
                        load_groups(given, x, which, X, order, owner, first, most)
                        quantize(x, sizes, top, scale, inverse, end, q, last_of("float32"))
                        T.copy(q, inbox[rank, first, 0], dst=owner)
                        T.copy(scale, in_scales[rank, first], dst=owner)
                        T.signal(arrived[rank, first // (chunk * HIGH)], dst=owner)
            else:
                source, first = (rank + size - z) % size, tile * HIGH
                come, come_scale = T.alloc((HIGH, GROUP), WIRE, level="l0"), T.alloc((HIGH,), "float32", level="l0")
                row = T.alloc((HIGH, copies), "int32", level="l1")
                if first < received[source] * each:
                    for i, c in T.Parallel(HIGH, copies):
                        token = (first + i) // each
                        place = places[source, T.min(token, most - 1), c]
                        row[i, c] = T.if_then_else(token < received[source], place, -1)
                    flag = tile // chunk
                    T.wait(arrived[source, flag], ">=", tiles_in(flag, chunk, received[source] * each, HIGH))
                    for i, j in T.Parallel(HIGH, GROUP):
                        come[i, j] = inbox[source, T.min(first + i, groups - 1), j]
                    for i in T.Parallel(HIGH):
                        come_scale[i] = in_scales[source, T.min(first + i, groups - 1)]
                    for i, j in T.Parallel(HIGH, GROUP):
                        for c in [*range(copies)]:
                            if row[i, c] >= 0:
                                R[row[i, c], (first + i) % each * GROUP + j] = come[i, j]
                    for i in T.Parallel(HIGH):
                        for c in [*range(copies)]:
                            if row[i, c] >= 0:
                                of_R[(first + i) % each, row[i, c]] = come_scale[i]


def scatter_float8_program(size: int, features: int, copies: int) -> Any:
    """`scatter_float8_grid` of rows of bfloat16."""
    given, most, room, groups = T.dynamic("given"), T.dynamic("most"), T.dynamic("room"), T.dynamic("groups")

    @T.prim_func
    def scatter_float8(
        X: T.Tensor((given, features), DTYPE),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        inbox: T.Tensor((size, groups, GROUP), WIRE),  # by source
        in_scales: T.Tensor((size, groups), "float32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, copies), "int32"),
        R: T.Tensor((room, features), WIRE),
        of_R: T.Tensor((features // GROUP, room), "float32"),
    ):
        scatter_float8_grid(X, order, sent, inbox, in_scales, received, places, R, of_R)

    return scatter_float8


def layer_float8_program(size: int, local: int, choices: int, features: int, inner: int, kind: str) -> Any:
    """The forward of a layer with float8 experts: `expert_programs.layer_program` with scales."""
    numbers, chunks, most, groups = (T.dynamic(name) for name in ("numbers", "chunks", "most", "groups"))
    room, tiles = T.dynamic("room"), T.dynamic("tiles")

    @T.prim_func
    def moe_layer_float8(
        X: T.Tensor((most, features), DTYPE),
        chosen: T.Tensor((numbers,), kind),
        shares: T.Tensor((numbers,), "float32"),
        gate_up: T.Tensor((local, 2 * inner, features), WIRE),
        of_gate_up: T.Tensor((local, 2 * inner // GROUP, features // GROUP), "float32"),
        down: T.Tensor((local, features, inner), WIRE),
        of_down: T.Tensor((local, features // GROUP, inner // GROUP), "float32"),
        in_chosen: T.Tensor((size, chunks, whole(choices)), "int32"),
        in_shares: T.Tensor((size, chunks, whole(choices)), "float32"),
        in_rows: T.Tensor((size, groups, GROUP), WIRE),
        in_scales: T.Tensor((size, groups), "float32"),
        in_sums: T.Tensor((size, most, features), DTYPE),
        counted: T.Tensor((size * chunks, local + 2), "int32"),
        W: T.Tensor((room,), "float32"),
        counts: T.Tensor((local,), "int32"),
        dropped: T.Tensor((local,), "int32"),
        owners: T.Tensor((tiles,), "int32"),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, choices), "int32"),
        before: T.Tensor((most + 1, size), "int32"),
        rows: T.Tensor((room, features), WIRE),
        of_rows: T.Tensor((features // GROUP, room), "float32"),
        active: T.Tensor((room, inner), WIRE),
        of_active: T.Tensor((inner // GROUP, room), "float32"),
        made: T.Tensor((room, features), DTYPE),
        Y: T.Tensor((most, features), DTYPE),
        sharers: T.int32,
    ):
        tables = W, counts, dropped, owners, order, sent, received, places, before
        tables_grids(chosen, shares, in_chosen, in_shares, counted, tables, True)
        scatter_float8_grid(X, order, sent, in_rows, in_scales, received, places, rows, of_rows)
        scaled_gated_grid(rows, of_rows, gate_up, of_gate_up, owners, active, of_active, size)
        scaled_grid(active, of_active, down, of_down, owners, made, size)
        sum_grid(made, W, received, places, in_sums, before, Y, sharers, UNIT_BYTES // 2, True)

    return moe_layer_float8
