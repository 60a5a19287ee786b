# SPDX-License-Identifier: MIT
"""Attention of one new token for each sequence, with keys split over the ranks: context-parallel decode.

Every rank attends to its own keys, in enough parts to fill the device (Flash-Decoding). Partial outputs and the log-sum
of their weights are sent in one message, and are merged where they arrive, in the order of ranks. Keys and values may
be paged, and be float8: see key_cache.py.
"""

import math
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import (
    MULTIPLE,
    as_autocast,
    check_count,
    check_flags,
    check_same,
    check_tensor,
    dense,
)
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.key_cache import (
    KEYS,
    CacheLayout,
    cache_of,
    check_cache,
    check_scale,
    check_table,
    in_memory,
    load_keys,
    room_for_keys,
    scales_of_heads,
    stages,
    table_of,
)
from tilescale.ops.layout import dtype_of
from tilescale.ops.operator import operator
from tilescale.ops.persistent import iterations_of_first
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.softmax import NOTHING, base2, begin, log_sum, mean, softmax_step
from tilescale.ops.workspace import workspace_of

HEADS = 64
"""Query heads of a block: the smallest multiple for tensor cores."""

THREADS = 256

TALL = 8
"""Heads that a block merges, at most."""

TOGETHER = 8
"""Parts of the keys that are merged at once, at most."""

TERMS, ROOM = 3, MULTIPLE
"""Number of terms of the outputs' type that a log-sum is sent as, each the rounding of the rest, and the columns
reserved for them: float32 has 24 significant bits, bfloat16 8."""

LEAST = -3e4
"""The least log-sum that is sent: float16 has it, and its weight is 0 next to any other."""


@plain_calls_repeat
@collective
def flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    own_heads: bool = False,
    group: Any = None,
) -> torch.Tensor:
    """Attention of one query of each sequence to the keys of all ranks. Collective.

    Args:
        q: (batch, heads, D), the same on all ranks; bfloat16 or float16.
        k, v: (batch, keys, key heads, D) and (batch, keys, key heads, DV): this rank's part of the cache, of q's
            type or float8_e4m3fn. `heads` is a multiple of the key heads; D and DV are multiples of 64, up to 576 and
            512. With a block table (pages, page size, key heads, D) and DV: page sizes are multiples of 16 up to 256,
            each page is contiguous, and pages of keys and of values may alternate in one tensor.
        lengths: (batch,), int32: the number of this rank's keys that count, from 0; all of them, if it is more. Entries
            after them, in the cache or in the last page, must be finite.
        block_table: (batch, pages), int32: this rank's pages of each sequence, in order, with as many columns on all
            ranks. Entries after the last key are not read and may have any value.
        k_scale, v_scale: factors of a float8 cache, float32, positive: one number, or one for each key head; None is 1.
        scale: positive factor of scores; None is 1 / sqrt(D).
        own_heads: whether a rank gets its own heads only, which takes less to send; all ranks have equally many.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (batch, heads, DV), or (batch, heads / ranks, DV).

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    q, k, v = as_autocast(q, k, v)
    check_tensor("q", q, 3)
    check_table(block_table, q)
    for name, x, of_name, of in ("k", k, "k_scale", k_scale), ("v", v, "v_scale", v_scale):
        check_cache(name, x, 4, q, block_table)
        check_scale(of_name, of, name, x, x.shape[2])
    check_same("dtype", "v", v, "k", k)
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[2]:
        raise ArgumentError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            hint="q is (batch, heads, D), k (batch, keys, key heads, D), v (batch, keys, key heads, DV)",
        )
    name = _checked(q, lengths, k.shape[2], v.shape[3], own_heads, group)
    caches = k, v, lengths, block_table, k_scale, v_scale
    return _operator(q, *caches, base2(scale, q.shape[2]), v.shape[3], own_heads, name)


@plain_calls_repeat
@collective
def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
    value_dim: int = 512,
    scale: float | None = None,
    own_heads: bool = False,
    group: Any = None,
) -> torch.Tensor:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of one query of each sequence. Collective.

    Args:
        q: (batch, heads, D), the same on all ranks, in the space of the latent keys.
        cache: (batch, keys, D), this rank's part: keys of all heads, whose first `value_dim` columns are the values; of
            the type of q or float8_e4m3fn. With a block table (pages, page size, D).
        lengths, block_table, own_heads, group: as for `flash_decode`.
        cache_scale: factor of a float8 cache, one float32 number, positive; None is 1.
        value_dim: multiples of 64, as is D: 512 and 576 in DeepSeek's models.
        scale: positive factor of scores; None is 1 / sqrt(D).

    Returns:
        (batch, heads, value_dim), or (batch, heads / ranks, value_dim).

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    q, cache = as_autocast(q, cache)
    check_tensor("q", q, 3)
    check_table(block_table, q)
    check_cache("cache", cache, 3, q, block_table)
    check_scale("cache_scale", cache_scale, "cache", cache, 1)
    check_count("value_dim", value_dim)
    if cache.shape[2] != q.shape[2] or value_dim >= q.shape[2]:
        raise ArgumentError(
            f"q is {tuple(q.shape)}, cache {tuple(cache.shape)}, value_dim {value_dim}",
            hint="q is (batch, heads, D), cache (batch, keys, D), and value_dim less than D",
        )
    name = _checked(q, lengths, 1, value_dim, own_heads, group)
    caches = cache[:, :, None], None, lengths, block_table, cache_scale, cache_scale
    return _operator(q, *caches, base2(scale, q.shape[2]), value_dim, own_heads, name)


def _checked(q: torch.Tensor, lengths: torch.Tensor, of_keys: int, value_dim: int, own_heads: bool, group: Any) -> str:
    """The group's name. Raises ArgumentError for what both operators do not serve."""
    name, (batch, heads, dim) = group_name(group), q.shape
    check_tensor("lengths", lengths, 1, (torch.int32,))
    check_same("device", "lengths", lengths, "q", q)
    if lengths.shape[0] != batch:
        raise ArgumentError(f"lengths has {lengths.shape[0]} numbers, q {batch} sequences", hint="one for each")
    check_flags(own_heads=own_heads)
    if not of_keys or heads % of_keys:
        raise ArgumentError(f"q has {heads} heads, k {of_keys}", hint="as many queries for each head of keys")
    for what, n, most in ("D", dim, 576), ("DV", value_dim, 512):
        if n % 64 or not 0 < n <= most:
            raise ArgumentError(f"{what} is {n}", hint=f"supported: multiples of 64 up to {most}")
    if own_heads and heads % size_of(name):
        raise ArgumentError(f"q has {heads} heads, the group has {size_of(name)} ranks", hint="all have equally many")
    return name


@operator("decode")
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scale: float,
    value_dim: int,
    own_heads: bool,
    group: str,
) -> torch.Tensor:
    """The merged outputs; without v, the first columns of k are the values."""
    team, (batch, heads, dim), of_keys = team_of(group), q.shape, k.shape[2]
    merged = heads // team.size if own_heads else heads
    result = q.new_empty(batch, merged, value_dim)
    if not batch:
        return result
    tiles = of_keys * math.ceil(heads // of_keys / HEADS)
    keys = k.shape[1] if block_table is None else block_table.shape[1] * k.shape[1]
    splits = 1 << max(min(at_once() // (batch * tiles), math.ceil(keys / KEYS)), 1).bit_length() - 1
    space = workspace_of(team)
    parts, sums = space.own(torch.float32, (splits, batch, heads, value_dim), (splits, batch, heads))
    (inbox,) = space.symmetric(q.dtype, (team.size, batch, heads, value_dim + ROOM))
    of_k, values = cache_of(k, block_table), k if v is None else v
    of_v = of_k if v is None else cache_of(v, block_table)
    given = (heads, of_keys, dim, value_dim, splits, at_once(), dtype_of(q), v is None, own_heads, scale, of_k, of_v)
    caches = in_memory(k, of_k), in_memory(values, of_v), dense(lengths), table_of(block_table, q)
    scales = (scales_of_heads(x, of_keys, of_k, q) for x in (k_scale, v_scale))
    kernel(program, team, *given)(dense(q), *caches, *scales, parts, sums, inbox, result)
    return result


@_operator.register_fake
def _(q: torch.Tensor, *given: Any) -> torch.Tensor:
    *_, value_dim, own_heads, group = given
    return q.new_empty(q.shape[0], q.shape[1] // size_of(group) if own_heads else q.shape[1], value_dim)


def program(
    size: int,
    heads: int,
    of_keys: int,
    dim: int,
    value_dim: int,
    splits: int,
    blocks: int,
    dtype: str,
    is_latent: bool,
    own_heads: bool,
    scale: float,
    of_k: CacheLayout,
    of_v: CacheLayout,
) -> Any:
    """A grid for `splits` parts of the keys; then one of `blocks`, as many as a device holds, exchanges and merges.

    So the second one alone communicates with other devices. A block merges the messages for the heads whose local parts
    it has merged. As messages are few, a rank has one flag for all messages of another rank.
    """
    batch, keys, pages, width = (T.dynamic(name) for name in ("batch", "keys", "pages", "width"))
    shape = (pages, of_k.page, of_keys) if of_k.page else (batch, keys, of_keys)
    factors = of_keys if of_k.is_narrow else 1
    tiles = of_keys * math.ceil(heads // of_keys / HEADS)
    merged = heads // size if own_heads else heads
    # Where there are more blocks than such groups of heads, they take smaller ones.
    high = math.gcd(min(TALL, 1 << max(heads // (splits * tiles), 1).bit_length() - 1), merged)

    @T.prim_func
    def decode(
        Q: T.Tensor((batch, heads, dim), dtype),
        K: T.Tensor((*shape, dim), of_k.dtype),
        V: T.Tensor((*shape, dim if is_latent else value_dim), of_v.dtype),
        lengths: T.Tensor((batch,), "int32"),
        table: T.Tensor((batch, width) if of_k.page else (1, 1), "int32"),
        k_scales: T.Tensor((factors,), "float32"),
        v_scales: T.Tensor((factors,), "float32"),
        parts: T.Tensor((splits, batch, heads, value_dim), "float32"),
        sums: T.Tensor((splits, batch, heads), "float32"),
        inbox: T.Tensor((size, batch, heads, value_dim + ROOM), dtype),  # by source
        Out: T.Tensor((batch, merged, value_dim), dtype),
    ):
        with T.Kernel(device=size, block=(splits, tiles, batch), threads=THREADS) as (split, place, b):
            with T.Scale("block"):
                scales = k_scales, v_scales, scale
                attend(Q, K, V, lengths, table, parts, sums, split, place, b, tiles, is_latent, scales, of_k, of_v)
        with T.Kernel(device=size, block=blocks, threads=THREADS) as block:
            arrived = T.alloc_flags((size,))
            with T.Scale("block"), T.Scale("device") as (rank, _):
                send_merged(parts, sums, inbox, arrived, block, blocks, high, batch, rank, merged)
                merge_received(inbox, Out, arrived, block, blocks, high, batch, rank, own_heads)

    return decode


@T.macro
def attend(Q, K, V, lengths, table, parts, sums, split, place, b, tiles, is_latent, scales, of_k, of_v):
    """A part of the keys for a tile of heads: the mean of their values, and the log of the sum of their weights."""
    splits, heads, value_dim = int(parts.shape[0]), int(parts.shape[2]), int(parts.shape[3])
    of_keys, dim, dtype = int(K.shape[2]), int(Q.shape[2]), str(Q.dtype)
    grouped, rest = heads // of_keys, dim - value_dim if is_latent else dim
    q = T.alloc((HEADS, value_dim if is_latent else dim), dtype, level="l1")
    k, v = T.alloc((KEYS, rest), dtype, level="l1"), T.alloc((KEYS, value_dim), dtype, level="l1")
    if of_k.is_narrow:
        narrow_k, narrow_v = (T.alloc((KEYS, n), of_k.dtype, level="l1") for n in (rest, value_dim))
    else:
        narrow_k, narrow_v = k, v
    scores, acc = (T.alloc((HEADS, n), "float32", level="l0") for n in (KEYS, value_dim))
    weights = T.alloc((HEADS, KEYS), dtype, level="l1")
    top, total = (T.alloc((HEADS,), "float32", level="l0") for _ in range(2))
    head, low = place * of_keys // tiles, place % (tiles // of_keys) * HEADS
    first = head * grouped + low
    k_scales, v_scales, scale = scales
    factor = scale
    if of_k.is_narrow:
        factor = T.alloc_var("float32")
        factor = k_scales[head] * scale
    count = T.min(lengths[b], room_for_keys(K, table, of_k))
    steps = T.ceildiv(count, KEYS)
    each = T.ceildiv(steps, splits)
    begin(top, total, acc)
    if is_latent:
        q_rest = T.alloc((HEADS, rest), dtype, level="l1")
        T.copy(Q[b, first, 0], q)
        T.copy(Q[b, first, value_dim], q_rest)
    else:
        T.copy(Q[b, first, 0], q)
    for step in T.Pipelined(T.max(T.min(each, steps - split * each), 0), num_stages=stages(of_k, is_latent)):
        at = (split * each + step) * KEYS
        load_keys(V, table, b, at, count, head, slice(0, value_dim), narrow_v, of_v)
        load_keys(K, table, b, at, count, head, slice(dim - rest, dim), narrow_k, of_k)
        if of_k.is_narrow:
            T.copy(narrow_v, v)
            T.copy(narrow_k, k)
        if is_latent:
            T.gemm(q, v, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
            T.gemm(q_rest, k, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
        else:
            T.gemm(q, k, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
        for i, j in T.Parallel(HEADS, KEYS):
            scores[i, j] = T.if_then_else(at + j < count, scores[i, j], NOTHING)
        softmax_step(scores, top, total, acc, factor)
        T.copy(scores, weights)
        T.gemm(weights, v, acc, policy=T.GemmWarpPolicy.FullCol)
    for i, j in T.Parallel(HEADS, value_dim):
        acc[i, j] = mean(acc[i, j], total[i])
        if of_k.is_narrow:
            acc[i, j] = acc[i, j] * v_scales[head]
    for i, j in T.Parallel(HEADS, value_dim):
        if low + i < grouped:
            parts[split, b, first + i, j] = acc[i, j]
    for i in T.Parallel(HEADS):
        if low + i < grouped:
            sums[split, b, first + i] = log_sum(top[i], total[i], factor)


@T.macro
def send_merged(parts, sums, inbox, arrived, block, blocks, high, batch, rank, merged):
    """Send the merged parts of this rank's keys, to all ranks or to the one whose heads they are."""
    splits, heads, value_dim = int(parts.shape[0]), int(parts.shape[2]), int(parts.shape[3])
    size, dtype, together = int(inbox.shape[0]), str(inbox.dtype), math.gcd(TOGETHER, splits)
    packed = T.alloc((high, value_dim + ROOM), dtype, level="l1")
    acc = T.alloc((high, value_dim), "float32", level="l0")
    weights, shares = T.alloc((high, splits), "float32", level="l0"), T.alloc((high, splits), "float32", level="l1")
    top, total = (T.alloc((high,), "float32", level="l0") for _ in range(2))
    for iteration, owner in T.grid(iterations_of_first(block, blocks, batch * (merged // high)), heads // merged):
        item = block + iteration * blocks
        b, first = item // (merged // high), owner * merged + item % (merged // high) * high
        T.clear(acc)
        for i, s in T.Parallel(high, splits):
            weights[i, s] = sums[s, b, first + i]
        T.reduce_max(weights, top, dim=1)
        for i, s in T.Parallel(high, splits):
            weights[i, s] = T.exp2(weights[i, s] - top[i])
        T.reduce_sum(weights, total, dim=1)
        T.copy(weights, shares)
        for some in T.serial(splits // together):
            for s in T.unroll(together):  # loaded at once: they need not wait for one another
                for i, j in T.Parallel(high, value_dim):
                    acc[i, j] += shares[i, some * together + s] * parts[some * together + s, b, first + i, j]
        pack(packed, acc, top, total)
        if merged == heads or owner == rank:
            for i, j in T.Parallel(high, value_dim + ROOM):
                inbox[rank, b, first + i, j] = packed[i, j]
        if merged == heads:
            for step in T.serial(1, size):
                T.copy(packed, inbox[rank, b, first, 0], dst=(rank + step) % size, signal=arrived[rank])
        elif owner != rank:
            T.copy(packed, inbox[rank, b, first, 0], dst=owner, signal=arrived[rank])


@T.macro
def merge_received(inbox, Out, arrived, block, blocks, high, batch, rank, own_heads):
    """Merge the partial results of all ranks' keys."""
    size, merged, value_dim = int(inbox.shape[0]), int(Out.shape[1]), int(Out.shape[2])
    acc = T.alloc((high, value_dim), "float32", level="l0")
    top, total, each = (T.alloc((high,), "float32", level="l0") for _ in range(3))
    for iteration in T.serial(iterations_of_first(block, blocks, batch * (merged // high))):
        item = block + iteration * blocks
        b, first = item // (merged // high), item % (merged // high) * high
        head = first + (rank * merged if own_heads else 0)
        begin(top, total, acc)
        for source in T.serial(size):
            if source != rank:
                T.wait(arrived[source], ">=", batch * (merged // high))
            for i in T.Parallel(high):
                top[i] = T.max(top[i], log_sum_in(inbox, source, b, head + i, value_dim))
        for source in T.serial(size):
            for i in T.Parallel(high):
                each[i] = T.exp2(log_sum_in(inbox, source, b, head + i, value_dim) - top[i])
                total[i] += each[i]
            for i, j in T.Parallel(high, value_dim):
                acc[i, j] += each[i] * T.cast(inbox[source, b, head + i, j], "float32")
        for i, j in T.Parallel(high, value_dim):
            Out[b, first + i, j] = mean(acc[i, j], total[i])


@T.macro
def pack(packed, acc, top, total):
    """Outputs, followed by the log-sum, as terms each of which rounds the rest."""
    high, value_dim = acc.shape
    left = T.alloc((high,), "float32", level="l0")
    for i, j in T.Parallel(high, value_dim):
        packed[i, j] = mean(acc[i, j], total[i])
    for i in T.Parallel(high):
        left[i] = T.max(T.log2(total[i]) + top[i], LEAST)
    for term in T.serial(TERMS):
        for i in T.Parallel(high):
            packed[i, value_dim + term] = left[i]
            left[i] = left[i] - T.cast(T.cast(left[i], packed.dtype), "float32")
    for i, j in T.Parallel(high, ROOM - TERMS):
        packed[i, value_dim + TERMS + j] = 0


def log_sum_in(inbox: Any, source: Any, b: Any, head: Any, value_dim: int) -> Any:
    """The log-sum that was packed."""
    return sum(T.cast(inbox[source, b, head, value_dim + term], "float32") for term in range(TERMS))
