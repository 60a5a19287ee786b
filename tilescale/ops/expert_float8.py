# SPDX-License-Identifier: MIT
"""Float8 experts: the grids that send tokens and sums as float8.

Tokens are quantized on the rank that they come from, and so are the activations between both GEMMs: each 128 numbers
of a row have a scale, a power of two (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2). A scale is sent
with its numbers. Weighted sums go back as bfloat16, or as float8 with scales of the same kind.
"""

import tilescale.language as T
from tilescale.ops.float8_wire import GROUP, quantize
from tilescale.ops.persistent import iterations_of_first
from tilescale.ops.row_exchange import CHUNKS, RESIDENT, SENDERS, SUMMING_SENDERS, THREADS, tiles_in
from tilescale.program.wire import WIRE, last_of

HIGH = 64
"""Groups that a block moves at once: its threads keep them as float32 and as float8."""


@T.macro
def load_groups(q, scale, temporaries, X, of_X, order, owner, first, most):
    """Consecutive groups of the tokens that go to a rank, quantized, and their scales; beyond the last token, those of
    a valid one."""
    given, which, x, sizes, top, inverse, end = temporaries
    each = int(X.shape[1]) // GROUP
    for i in T.Parallel(HIGH):
        which[i] = order[owner, T.min((first + i) // each, most - 1)]
    for i, j in T.Parallel(HIGH, GROUP):
        given[i, j] = X[which[i], (first + i) % each * GROUP + j]
    if X.dtype == WIRE:
        for i in T.Parallel(HIGH):
            scale[i] = of_X[which[i] * each + (first + i) % each]
        T.copy(given, q)
    else:
        for i, j in T.Parallel(HIGH, GROUP):
            x[i, j] = T.cast(given[i, j], "float32")
        quantize(x, sizes, top, scale, inverse, end, q, last_of("float32"))


@T.macro
def scatter_float8_grid(X, of_X, order, sent, inbox, in_scales, received, places, R, of_R, wide, keeps):
    """R[places[s, i]] = X[order[s][i]] of rank s in float8, and in a column of of_R the scales of that row; `wide` has
    the rows times their scales, if it `keeps` them. Float8 tokens have the scales `of_X`, others are quantized.

    A tile is a number of groups of consecutive tokens, not of a whole number of tokens. The first blocks send; the
    others take this rank's own tokens meanwhile, and then those that arrive.
    """
    size, groups, most, copies = int(in_scales.shape[0]), in_scales.shape[1], places.shape[1], int(places.shape[2])
    each = int(X.shape[1]) // GROUP
    with T.Kernel(device=size, block=(T.ceildiv(groups, HIGH), size), threads=THREADS) as (tile, z):
        arrived = T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        T.assume(groups >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            T.annotate_min_blocks_per_sm(RESIDENT)
            q, scale = T.alloc((HIGH, GROUP), WIRE, level="l0"), T.alloc((HIGH,), "float32", level="l0")
            row, which = T.alloc((HIGH, copies), "int32", level="l1"), T.alloc((HIGH,), "int32", level="l1")
            given, x, sizes = (T.alloc((HIGH, GROUP), kind, level="l0") for kind in (X.dtype, "float32", "int32"))
            top, inverse, end = (T.alloc((HIGH,), kind, level="l0") for kind in ("int32", "float32", "float32"))
            temporaries = given, which, x, sizes, top, inverse, end
            pieces = T.ceildiv(groups, HIGH)
            chunk = T.ceildiv(pieces, CHUNKS)  # tiles that share a flag
            if size > 1:
                if z == 0:
                    senders = T.min(SENDERS, pieces)
                    for iteration in T.serial(iterations_of_first(tile, senders, (size - 1) * pieces)):
                        number = tile + iteration * senders
                        owner, first = (T.alloc_var("int32") for _ in range(2))  # short indices take less time to lower
                        owner, first = (rank + 1 + number // pieces) % size, number % pieces * HIGH
                        if first < sent[owner] * each:
                            load_groups(q, scale, temporaries, X, of_X, order, owner, first, most)
                            T.copy(q, inbox[rank, first, 0], dst=owner)
                            T.copy(scale, in_scales[rank, first], dst=owner)
                            T.signal(arrived[rank, first // (chunk * HIGH)], dst=owner)
            source, begin = (rank + size - z) % size, tile * HIGH
            if begin < received[source] * each:
                for i, c in T.Parallel(HIGH, copies):
                    token = (begin + i) // each
                    place = places[source, T.min(token, most - 1), c]
                    row[i, c] = T.if_then_else(token < received[source], place, -1)
                if z == 0:
                    load_groups(q, scale, temporaries, X, of_X, order, rank, begin, most)
                else:
                    flag = tile // chunk
                    T.wait(arrived[source, flag], ">=", tiles_in(flag, chunk, received[source] * each, HIGH))
                    for i, j in T.Parallel(HIGH, GROUP):
                        q[i, j] = inbox[source, T.min(begin + i, groups - 1), j]
                    for i in T.Parallel(HIGH):
                        scale[i] = in_scales[source, T.min(begin + i, groups - 1)]
                for i, j in T.Parallel(HIGH, GROUP):
                    for c in [*range(copies)]:
                        if row[i, c] >= 0:
                            R[row[i, c], (begin + i) % each * GROUP + j] = q[i, j]
                            if keeps:
                                number = T.cast(q[i, j], "float32") * scale[i]
                                wide[row[i, c], (begin + i) % each * GROUP + j] = number
                for i in T.Parallel(HIGH):
                    for c in [*range(copies)]:
                        if row[i, c] >= 0:
                            of_R[(begin + i) % each, row[i, c]] = scale[i]


@T.macro
def load_copies(which, share, W, places, source, slot, received):
    """The rows of the tokens in slots of a rank, and their weights; -1 and 0 for a slot that is not `received`."""
    for i, c in T.Parallel(which.shape[0], which.shape[1]):
        place = places[source, T.max(T.min(slot[i], places.shape[1] - 1), 0), c]
        which[i, c] = T.if_then_else((slot[i] >= 0) & (slot[i] < received), place, -1)
        share[i, c] = T.if_then_else(which[i, c] >= 0, W[T.max(which[i, c], 0)], 0)


@T.macro
def sum_groups(total, Y, which, share, first, each):
    """The weighted sums of the copies of consecutive groups."""
    T.clear(total)
    for c in T.unroll(which.shape[1]):
        for i, j in T.Parallel(total.shape[0], GROUP):
            far = Y[which[i, c], (first + i) % each * GROUP + j]
            total[i, j] += T.cast(T.if_then_else(which[i, c] >= 0, far, T.cast(0, Y.dtype)), "float32") * share[i, c]


@T.macro
def sum_float8_grid(Y, W, received, places, inbox, in_scales, before, Out):
    """`sum_grid` with sums that travel as float8, in tiles as those of `scatter_float8_grid`.

    A rank's own sum is rounded to the type of the result, and not to float8.
    """
    size, groups, copies = int(in_scales.shape[0]), in_scales.shape[1], int(places.shape[2])
    most, each = places.shape[1], int(Out.shape[1]) // GROUP
    with T.Kernel(device=size, block=(T.ceildiv(groups, HIGH), 2), threads=THREADS) as (tile, z):
        arrived = T.alloc_flags((size, CHUNKS))
        T.assume(most >= 1)
        T.assume(groups >= 1)
        with T.Scale("block"), T.Scale("device") as (rank, _):
            T.annotate_min_blocks_per_sm(RESIDENT)
            pieces = T.ceildiv(groups, HIGH)
            chunk = T.ceildiv(pieces, CHUNKS)  # tiles that share a flag
            total = T.alloc((HIGH, GROUP), "float32", level="l0")
            which, share = (T.alloc((HIGH, copies), kind, level="l1") for kind in ("int32", "float32"))
            slot = T.alloc((HIGH,), "int32", level="l1")
            if size > 1:
                if z == 0:
                    sizes, top = T.alloc((HIGH, GROUP), "int32", level="l0"), T.alloc((HIGH,), "int32", level="l0")
                    scale, inverse, end = (T.alloc((HIGH,), "float32", level="l0") for _ in range(3))
                    q = T.alloc((HIGH, GROUP), WIRE, level="l0")
                    senders = T.min(SUMMING_SENDERS, pieces)
                    for iteration in T.serial(iterations_of_first(tile, senders, (size - 1) * pieces)):
                        number = tile + iteration * senders
                        home, first = (T.alloc_var("int32") for _ in range(2))
                        home, first = (rank + 1 + number // pieces) % size, number % pieces * HIGH
                        if first < received[home] * each:
                            for i in T.Parallel(HIGH):
                                slot[i] = (first + i) // each
                            load_copies(which, share, W, places, home, slot, received[home])
                            sum_groups(total, Y, which, share, first, each)
                            quantize(total, sizes, top, scale, inverse, end, q, last_of("float32"))
                            T.copy(q, inbox[rank, first, 0], dst=home)
                            T.copy(scale, in_scales[rank, first], dst=home)
                            T.signal(arrived[rank, first // (chunk * HIGH)], dst=home)
            if z > 0:
                first, own = tile * HIGH, T.alloc((HIGH, GROUP), Out.dtype, level="l0")
                lines = T.alloc((size, HIGH), "int32", level="l1")
                for s, i in T.Parallel(size, HIGH):
                    row = T.min((first + i) // each, most - 1)
                    lines[s, i] = T.if_then_else(before[row + 1, s] > before[row, s], before[row, s], -1)
                for i in T.Parallel(HIGH):
                    slot[i] = lines[rank, i]
                load_copies(which, share, W, places, rank, slot, most)
                T.sync_threads()  # the tables are there, also where nothing is waited for
                sum_groups(total, Y, which, share, first, each)  # this rank's sum takes the time in which others arrive
                T.copy(total, own)
                for step in T.serial(1, size):
                    source = (rank + size - step) % size
                    row, last = T.min(first // each, most - 1), T.min((first + HIGH - 1) // each, most - 1) + 1
                    begin, end_of = before[row, source] * each, before[last, source] * each
                    for c in T.serial(begin // (HIGH * chunk), T.ceildiv(end_of, HIGH * chunk)):
                        T.wait(arrived[source, c], ">=", tiles_in(c, chunk, before[most, source] * each, HIGH))
                T.clear(total)
                for source in T.unroll(size):
                    for i, j in T.Parallel(HIGH, GROUP):
                        group = T.max(lines[source, i], 0) * each + (first + i) % each
                        come = T.if_then_else(  # the load itself is conditional: other sums may still arrive
                            lines[source, i] >= 0,
                            T.cast(inbox[source, group, j], "float32") * in_scales[source, group],
                            0,
                        )
                        total[i, j] += T.if_then_else(source == rank, T.cast(own[i, j], "float32"), come)
                for i, j in T.Parallel(HIGH, GROUP):
                    if first + i < most * each:
                        Out[(first + i) // each, (first + i) % each * GROUP + j] = total[i, j]
