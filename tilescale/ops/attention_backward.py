# SPDX-License-Identifier: MIT
"""The backward of sequence_attention.py, as FlashAttention-2 has it (Dao, arXiv:2307.08691, algorithm 2).

Weights are recomputed from the scores and their log-sums. Keys and values are sent again, over the same routes. A grid
over queries sums up their gradients, a grid over keys those of keys and values: scores are computed twice, but no two
blocks add to the same memory, and results have the same bits each time. A rank's contribution to the gradients of
another rank's keys is sent by the copy queue concurrently: to the owner, or on a ring to the next rank, which adds its
contribution. This rank's keys are last, with the contributions that have arrived for them.
"""

import math
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.ops.arguments import dense
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.sequence_parts import (
    COMPUTING,
    LOADING,
    PARTS,
    THREADS,
    first_seeing,
    keys_seen,
    part_of,
    send_halves,
    wait_for,
)
from tilescale.ops.workspace import workspace_of

LN2 = math.log(2)

TALL, STEP = 128, 64
"""Queries or keys of a block, and the others of a step."""


def gradients(
    grad: torch.Tensor,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    sums: torch.Tensor,
    how: tuple[bool, bool, bool, float],
    team: Team,
) -> list[torch.Tensor]:
    """The gradients of q, k and v.

    Args:
        grad, out: (batch, tokens, heads, D): the result, and its gradient.
        given: q, k and v.
        sums: (batch, PARTS, heads, tokens / PARTS): log2 of the sum of each query's weights.
        how: causal, zigzag, ring, and the factor of scores before 2 ** score.
    """
    (batch, tokens, heads, dim), of_keys = grad.shape, given[1].shape[2]
    half = tokens // PARTS
    q, k, v, slope = (dense(x).view(batch, PARTS, half, -1, dim) for x in (*given, grad))
    means = (grad.float() * out).sum(-1).view(batch, PARTS, half, heads).transpose(2, 3)
    rows = torch.nn.functional.pad(torch.stack([sums, means]), (0, -half % TALL))
    space, theirs = workspace_of(team), (team.size * 2 * batch * PARTS, half, of_keys, dim)
    gathered = space.symmetric(k.dtype, *[(PARTS * team.size, batch, half, of_keys, dim)] * 2, theirs)
    (parts,) = space.own(k.dtype, theirs)
    of_q, of_k, of_v = torch.empty_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    made = kernel(program, team, batch, heads, of_keys, dim, dtype_of(k), *how)
    made(q, k, v, slope, rows, *gathered, parts, of_q, of_k, of_v)
    whole = batch, tokens, -1, dim
    return [of_q.to(q.dtype).view(whole), of_k.view(whole), of_v.view(whole)]


def program(
    size: int,
    batch: int,
    heads: int,
    of_keys: int,
    dim: int,
    dtype: str,
    causal: bool,
    zigzag: bool,
    ring: bool,
    scale: float,
) -> Any:
    """A grid over queries and one over keys for the keys of each rank; this rank's keys are the first and the last."""
    half, padded = T.dynamic("half"), T.dynamic("padded")
    how = size, causal, zigzag, scale
    slots = 2 * batch * PARTS  # gradients of keys, then of values
    last = (0, 1) if ring else (1, size)  # the range of the inbox for this rank's keys

    @T.prim_func
    def sequence_attention_backward(
        Q: T.Tensor((batch, PARTS, half, heads, dim), dtype),
        K: T.Tensor((batch, PARTS, half, of_keys, dim), dtype),
        V: T.Tensor((batch, PARTS, half, of_keys, dim), dtype),
        dO: T.Tensor((batch, PARTS, half, heads, dim), dtype),
        Rows: T.Tensor((2, batch, PARTS, heads, padded), "float32"),  # log-sums, and sums of out times its gradient
        GK: T.Tensor((PARTS * size, batch, half, of_keys, dim), dtype),
        GV: T.Tensor((PARTS * size, batch, half, of_keys, dim), dtype),
        inbox: T.Tensor((size * slots, half, of_keys, dim), dtype),  # by step of the sender, or own one
        parts: T.Tensor((size * slots, half, of_keys, dim), dtype),  # by step
        dQ: T.Tensor((batch, PARTS, half, heads, dim), "float32"),
        dK: T.Tensor((batch, PARTS, half, of_keys, dim), dtype),
        dV: T.Tensor((batch, PARTS, half, of_keys, dim), dtype),
    ):
        grid = (T.ceildiv(half, TALL), heads * PARTS, batch)
        with T.Kernel(device=size, block=grid, threads=THREADS) as (tile, place, b):
            arrived, returned = T.alloc_flags((PARTS * size,)), T.alloc_flags((size,))
            if size > 1:
                with T.Scale("device") as (rank, _):
                    send_halves(K, V, GK, GV, arrived, rank, size, batch, ring)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                add_to_queries(Q, K, V, dO, Rows, dQ, tile, place, b, rank, rank, True, *how)
            if size > 1:
                for step in T.serial(1, size):
                    wait_for(arrived, step, size, batch)
                    with T.Scale("block"), T.Scale("device") as (rank, _):
                        source = (rank + size - step) % size
                        add_to_queries(Q, GK, GV, dO, Rows, dQ, tile, place, b, rank, source, False, *how)
                    wait_for_others(returned, step, ring)
                    with T.Scale("block"), T.Scale("device") as (rank, _):
                        source = (rank + size - step) % size
                        added = (T.max(step, 2), step + 1) if ring else (step, step)
                        made = parts, parts, step
                        add_to_keys(
                            Q, GK, GV, dO, Rows, inbox, *added, *made, tile, place, b, rank, source, False, *how
                        )
                    send_part(parts, inbox, returned, step, size, ring)
                with T.Scale("device"):
                    for slot in T.serial(*last):
                        T.wait(returned[slot], ">=", 1)
            else:
                with T.Scale("device"):  # a phase for the queries and one for the keys
                    pass
            with T.Scale("block"), T.Scale("device") as (rank, _):
                made = dK, dV, 0
                add_to_keys(Q, K, V, dO, Rows, inbox, *last, *made, tile, place, b, rank, rank, True, *how)

    return sequence_attention_backward


@T.macro
def wait_for_others(returned, step, ring):
    """On a ring, wait for the contributions of the previous ranks to the gradients of the same keys."""
    with T.Scale("device"):
        if ring:
            if step > 1:
                T.wait(returned[step], ">=", 1)


@T.macro
def send_part(parts, inbox, returned, step, size, ring):
    """Send this rank's contribution to the gradients of keys to their owner, or round the ring, by the queue.

    The next rank on the ring has the same keys a step later, and after the last one they are its own.
    """
    slot = (step + 1) % size if ring else step
    each = parts.shape[0] // size
    with T.Scale("device") as (rank, _):
        T.copy(
            parts[step * each : (step + 1) * each, :, :, :],
            inbox[slot * each : (slot + 1) * each, :, :, :],
            dst=(rank + (1 if ring else size - step)) % size,
            signal=returned[slot],
        )


@T.macro
def add_to_queries(Q, K, V, dO, Rows, dQ, tile, place, b, rank, source, is_own, size, causal, zigzag, scale):
    """dQ += the gradients of a tile of queries by the keys of one rank; this rank's keys are first."""
    half, heads, dim, dtype = Q.shape[2], int(Q.shape[3]), int(Q.shape[4]), str(Q.dtype)
    of_keys = int(K.shape[3])
    q, slope = (T.alloc((TALL, dim), dtype, level="l1") for _ in range(2))
    k, v = (T.alloc((STEP, dim), dtype, level="l1") for _ in range(2))
    scores, slopes = (T.alloc((TALL, STEP), "float32", level="l0") for _ in range(2))
    change = T.alloc((TALL, STEP), dtype, level="l0")
    acc = T.alloc((TALL, dim), "float32", level="l0")
    sums, means = (T.alloc((TALL,), "float32", level="l0") for _ in range(2))
    first, shift = T.alloc_var("int32"), T.alloc_var("int32")
    first = (T.ceildiv(half, TALL) - 1 - tile) * TALL if causal else tile * TALL
    head, part = place // PARTS, place % PARTS
    mine = part_of(rank, part, size, zigzag)
    T.annotate_producer_reg_dealloc(LOADING)
    T.annotate_consumer_reg_alloc(COMPUTING)
    T.copy(Q[b, part, first : first + TALL, head, :], q)
    T.copy(dO[b, part, first : first + TALL, head, :], slope)
    for i in T.Parallel(TALL):
        sums[i] = Rows[0, b, part, head, first + i]
        means[i] = Rows[1, b, part, head, first + i]
    T.clear(acc)
    if not is_own:
        for i, j in T.Parallel(TALL, dim):
            if first + i < half:
                acc[i, j] = dQ[b, part, first + i, head, j]
    front = T.ceildiv(keys_seen(mine, part_of(source, 0, size, zigzag), first + TALL, half, causal), STEP)
    back = T.ceildiv(keys_seen(mine, part_of(source, 1, size, zigzag), first + TALL, half, causal), STEP)
    shift = -front * STEP
    for n in T.Pipelined(front + back, num_stages=2):
        h = T.if_then_else(n < front, 0, 1)
        at = n * STEP + T.if_then_else(n < front, 0, shift)
        theirs = part_of(source, h, size, zigzag)
        outer, inner = (b, h) if is_own else (source * PARTS + h, b)
        T.copy(K[outer, inner, at : at + STEP, head * of_keys // heads, :], k)
        T.copy(V[outer, inner, at : at + STEP, head * of_keys // heads, :], v)
        T.gemm(q, k, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(slope, v, slopes, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        for i, j in T.Parallel(TALL, STEP):
            is_seen = (at + j < half) & ((theirs < mine) | (at + j <= first + i))
            weight = T.exp2(scores[i, j] * scale - sums[i]) * (slopes[i, j] - means[i]) * (scale * LN2)
            scores[i, j] = T.if_then_else(is_seen if causal else at + j < half, weight, 0)
        T.copy(scores, change)
        T.gemm(change, k, acc, policy=T.GemmWarpPolicy.FullRow)
    for i, j in T.Parallel(TALL, dim):
        if first + i < half:
            dQ[b, part, first + i, head, j] = acc[i, j]


@T.macro
def add_to_keys(
    Q, K, V, dO, Rows, inbox, begin, end, dK, dV, step, tile, place, b, rank, source, is_own, size, causal, zigzag,
    scale,
):  # fmt: skip
    """The gradients of a tile of keys of one rank by this rank's queries, plus `begin` to `end` of the inbox.

    Blocks of heads that keys do not have make nothing.
    """
    half, heads, dim, dtype = Q.shape[2], int(Q.shape[3]), int(Q.shape[4]), str(Q.dtype)
    batch, of_keys = int(Q.shape[0]), int(K.shape[3])
    grouped, few = heads // of_keys, STEP * 64 // dim  # two sums of the widest rows leave registers for half a step
    k, v, out_k, out_v = (T.alloc((TALL, dim), dtype, level="l1") for _ in range(4))
    q, slope = (T.alloc((few, dim), dtype, level="l1") for _ in range(2))
    sums, means = (T.alloc((few,), "float32", level="l1") for _ in range(2))
    scores, slopes = (T.alloc((TALL, few), "float32", level="l0") for _ in range(2))
    weights = T.alloc((TALL, few), dtype, level="l0")
    of_k, of_v = (T.alloc((TALL, dim), "float32", level="l0") for _ in range(2))
    first, part = tile * TALL, place % PARTS
    is_head, head = place // PARTS < of_keys, T.min(place // PARTS, of_keys - 1)
    outer, inner = (b, part) if is_own else (source * PARTS + part, b)
    theirs = part_of(source, part, size, zigzag)
    T.annotate_producer_reg_dealloc(LOADING)
    T.annotate_consumer_reg_alloc(COMPUTING)
    T.copy(K[outer, inner, first : first + TALL, head, :], k)
    T.copy(V[outer, inner, first : first + TALL, head, :], v)
    T.clear(of_k)
    T.clear(of_v)
    # In each half of the queries, start at the first one that sees a key of the tile, which is that of a step.
    begin_front, begin_back, front, steps = (T.alloc_var("int32") for _ in range(4))
    begin_front = first_seeing(part_of(rank, 0, size, zigzag), theirs, first, half, causal)
    begin_back = first_seeing(part_of(rank, 1, size, zigzag), theirs, first, half, causal)
    front = T.ceildiv(half - begin_front, few)
    steps = front + T.ceildiv(half - begin_back, few)
    begin_back = begin_back - front * few
    for n in T.Pipelined(T.if_then_else(is_head, grouped * steps, 0), num_stages=2):
        number = n % steps
        h = T.if_then_else(number < front, 0, 1)
        at = number * few + T.if_then_else(number < front, begin_front, begin_back)
        mine = part_of(rank, h, size, zigzag)
        own = head * grouped + n // steps
        T.copy(Q[b, h, at : at + few, own, :], q)
        T.copy(dO[b, h, at : at + few, own, :], slope)
        T.copy(Rows[0, b, h, own, at : at + few], sums)
        T.copy(Rows[1, b, h, own, at : at + few], means)
        T.gemm(k, q, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(v, slope, slopes, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        for i, j in T.Parallel(TALL, few):
            is_seen = (at + j < half) & ((theirs < mine) | (first + i <= at + j))
            weight = T.exp2(scores[i, j] * scale - sums[j])
            scores[i, j] = T.if_then_else(is_seen if causal else at + j < half, weight, 0)
        T.copy(scores, weights)
        T.gemm(weights, slope, of_v, policy=T.GemmWarpPolicy.FullRow)
        for i, j in T.Parallel(TALL, few):
            scores[i, j] = scores[i, j] * (slopes[i, j] - means[j]) * (scale * LN2)
        T.copy(scores, weights)
        T.gemm(weights, q, of_k, policy=T.GemmWarpPolicy.FullRow)
    if size > 1:
        for earlier in T.serial(begin, end):
            for i, j in T.Parallel(TALL, dim):
                if first + i < half:
                    of_k[i, j] += T.cast(inbox[slot_of(earlier, 0, batch, b, part), first + i, head, j], "float32")
                    of_v[i, j] += T.cast(inbox[slot_of(earlier, 1, batch, b, part), first + i, head, j], "float32")
    T.copy(of_k, out_k)
    T.copy(of_v, out_v)
    if is_head:
        if is_own:
            T.copy(out_k, dK[b, part, first : first + TALL, head, :])
            T.copy(out_v, dV[b, part, first : first + TALL, head, :])
        else:
            T.copy(out_k, dK[slot_of(step, 0, batch, b, part), first : first + TALL, head, :])
            T.copy(out_v, dV[slot_of(step, 1, batch, b, part), first : first + TALL, head, :])


def slot_of(step: Any, of_values: int, batch: int, b: Any, part: Any) -> Any:
    """Slot of the gradients of keys or of values of a step."""
    return ((step * 2 + of_values) * batch + b) * PARTS + part
