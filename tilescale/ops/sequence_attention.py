# SPDX-License-Identifier: MIT
"""Attention of sequences whose tokens are split over the ranks (context parallelism): all keys and values are sent to
all ranks.

The copy queue sends them while a grid attends to those that have arrived, this rank's first: to all ranks, or round a
ring (Liu et al., arXiv:2310.01889), where each rank forwards received keys and communicates with two neighbours only.
With a causal mask, a rank has one part from the front of the sequence and one from its end ("zigzag"), so the load is
balanced.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops import attention_backward
from tilescale.ops.arguments import as_autocast, check_count, check_flags, check_like, check_same, check_tensor, dense
from tilescale.ops.attention_backward import LN2
from tilescale.ops.dtensors import takes_dtensors
from tilescale.ops.group import collective, group_name, rank_of, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.operator import operator
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.sequence_parts import COMPUTING, LOADING, PARTS, THREADS, keys_seen, part_of, send_halves, wait_for
from tilescale.ops.softmax import NOTHING, base2, begin, log_sum, mean, softmax_step
from tilescale.ops.workspace import workspace_of

QUERIES, KEYS = 128, 128
"""Queries of a block, and keys of a step."""


@plain_calls_repeat
@collective
@takes_dtensors(1, q=1, k=1, v=1)
def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    zigzag: bool = False,
    ring: bool = False,
    scale: float | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks, which arrive during the computation. Collective.

    Args:
        q: (batch, tokens, heads, D), this rank's tokens, as many on all ranks, an even number; bfloat16 or float16.
        k, v: (batch, tokens, key heads, D): theirs; `heads` is a multiple of the key heads, D is 64 or 128.
        causal: whether a token sees itself and those before it only.
        zigzag: whether this rank's tokens are those of `sequence_positions(..., zigzag=True)`, else as many in order.
        ring: whether keys and values go round by neighbours, else from all ranks to all ranks.
        scale: positive factor of scores; None is 1 / sqrt(D).
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor like q. It can be differentiated.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    tensors, how = _checked(q, k, v, causal, zigzag, ring, scale)
    return _operator(*tensors, *how, group_name(group))[0]


@plain_calls_repeat
@collective
def sequence_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    zigzag: bool = False,
    ring: bool = False,
    scale: float | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sequence_attention` with the logarithms that `sequence_attention_backward` takes. Collective.

    Args:
        q, k, v, causal, zigzag, ring, scale, group: as for `sequence_attention`, but no DTensors.

    Returns:
        A tensor like q, and of each query the natural logarithm of the sum of its exponentials, as FlashAttention has
        it: (batch, heads, tokens), float32. The former can be differentiated.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    tensors, how = _checked(q, k, v, causal, zigzag, ring, scale)
    out, sums = _operator(*tensors, *how, group_name(group))
    return out, sums.transpose(1, 2).flatten(2) * LN2


@plain_calls_repeat
@collective
def sequence_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    zigzag: bool = False,
    ring: bool = False,
    scale: float | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `sequence_attention`, from its result and log-sums. Collective.

    Args:
        grad: the gradient of the result, like q.
        q, k, v, causal, zigzag, ring, scale, group: as for `sequence_attention`, but no DTensors.
        out: the result, like q.
        lse: (batch, heads, tokens), float32: of each query the natural logarithm of the sum of its exponentials, over
            the keys of all ranks.

    Returns:
        The gradients of q, k and v.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    tensors, how = _checked(q, k, v, causal, zigzag, ring, scale)
    (batch, tokens, heads, _), like = tensors[0].shape, tensors[0]
    grad, out = as_autocast(grad, out)
    for name, x in ("grad", grad), ("out", out):
        check_tensor(name, x, 4)
        check_like(name, x, "q", like)
        if x.shape != like.shape:
            raise ArgumentError(
                f"{name} is {tuple(x.shape)}, q {tuple(like.shape)}", hint=f"give {name} the shape of q"
            )
    check_tensor("lse", lse, 3, (torch.float32,))
    check_same("device", "lse", lse, "q", like)
    if lse.shape != (batch, heads, tokens):
        raise ArgumentError(f"lse is {tuple(lse.shape)}", hint=f"(batch, heads, tokens) is {(batch, heads, tokens)}")
    sums = lse.unflatten(2, (PARTS, tokens // PARTS)).transpose(1, 2) / LN2
    of_q, of_k, of_v = _gradients(grad, *tensors, out, sums, *how, group_name(group))
    return of_q, of_k, of_v


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, zigzag: bool, ring: bool, scale: float | None
) -> tuple[list[torch.Tensor], tuple[bool, bool, bool, float]]:
    """q, k and v, and the operators' further arguments. Raises ArgumentError for unsupported ones."""
    check_flags(causal=causal, zigzag=zigzag, ring=ring)
    q, k, v = as_autocast(q, k, v)
    check_tensor("q", q, 4)
    for name, x in ("k", k), ("v", v):
        check_tensor(name, x, 4)
        check_like(name, x, "q", q)
        if x.shape[:2] != q.shape[:2] or x.shape[3] != q.shape[3] or x.shape != k.shape:
            raise ArgumentError(
                f"{name} is {tuple(x.shape)}, q {tuple(q.shape)}",
                hint="q is (batch, tokens, heads, D), k and v are (batch, tokens, key heads, D)",
            )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ArgumentError(f"q has {q.shape[2]} heads, k {k.shape[2]}", hint="as many queries for each head of keys")
    if q.shape[3] not in (64, 128):
        raise ArgumentError(f"D is {q.shape[3]}", hint="supported: 64 and 128")
    if q.shape[1] % PARTS:
        raise ArgumentError(f"q has {q.shape[1]} tokens", hint="give each rank an even number of tokens")
    return [q, k, v], (causal, zigzag, ring, base2(scale, q.shape[3]))


def sequence_positions(tokens: int, *, zigzag: bool = False, group: Any = None) -> torch.Tensor:
    """Positions of this rank's tokens in the sequence, for selection and rotary embeddings.

    Args:
        tokens: of each rank, an even number.
        zigzag: half of them from the front, half from the end, so that all ranks have as much to do under a causal
            mask; else as many in order.
        group: as for `sequence_attention`.

    Returns:
        (tokens,), int64.

    Raises:
        ArgumentError: tokens are not an even number, or no group.
    """
    check_count("tokens", tokens, least=0)
    if tokens % PARTS:
        raise ArgumentError(f"tokens is {tokens}", hint="give each rank an even number of tokens")
    name = group_name(group)
    half, size, rank = tokens // PARTS, size_of(name), rank_of(name)
    return torch.cat([torch.arange(half) + part_of(rank, h, size, zigzag) * half for h in range(PARTS)])


@operator("sequence_attention")
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    zigzag: bool,
    ring: bool,
    scale: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of this rank's tokens, and log2 of the sums of their weights, (batch, PARTS, heads, tokens /
    PARTS)."""
    team, (batch, tokens, heads, dim) = team_of(group), q.shape
    result, sums = _made(q)
    if not q.numel():
        return result, sums
    halves = [dense(x).view(batch, PARTS, tokens // PARTS, -1, dim) for x in (q, k, v)]
    shape, space = (PARTS * team.size, batch, *halves[1].shape[2:]), workspace_of(team)
    gathered = space.symmetric(q.dtype, shape, shape)
    states = space.own(torch.float32, tuple(halves[0].shape), (2, batch, PARTS, heads, tokens // PARTS))
    given = batch, heads, k.shape[2], dim, dtype_of(q), causal, zigzag, ring, scale
    kernel(program, team, *given)(*halves, *gathered, *states, result.view(halves[0].shape), sums)
    return result, sums


def _made(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, heads, _ = q.shape
    sums = q.new_empty(batch, PARTS, heads, tokens // PARTS, dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums


_operator.register_fake(lambda q, *_: _made(q))


@operator("sequence_attention_backward")
def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    zigzag: bool,
    ring: bool,
    scale: float,
    group: str,
) -> list[torch.Tensor]:
    if not q.numel():
        return [torch.empty_like(x) for x in (q, k, v)]
    how = causal, zigzag, ring, scale
    return attention_backward.gradients(grad, (q, k, v), out, sums, how, team_of(group))


@_gradients.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.given = inputs[3:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return tuple(_gradients(grad, *ctx.saved_tensors, *ctx.given))


_operator.register_autograd(_backward, setup_context=_setup)


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
    """A grid for the keys of each rank, once they have arrived, this rank's first; between grids, states are in memory.

    No program waits inside, so each grid has the producer that plain attention has.
    """
    half = T.dynamic("half")
    how = causal, zigzag, scale

    @T.prim_func
    def sequence_attention(
        Q: T.Tensor((batch, PARTS, half, heads, dim), dtype),
        K: T.Tensor((batch, PARTS, half, of_keys, dim), dtype),
        V: T.Tensor((batch, PARTS, half, of_keys, dim), dtype),
        GK: T.Tensor((PARTS * size, batch, half, of_keys, dim), dtype),
        GV: T.Tensor((PARTS * size, batch, half, of_keys, dim), dtype),
        Acc: T.Tensor((batch, PARTS, half, heads, dim), "float32"),
        State: T.Tensor((2, batch, PARTS, heads, half), "float32"),
        Out: T.Tensor((batch, PARTS, half, heads, dim), dtype),
        Sums: T.Tensor((batch, PARTS, heads, half), "float32"),
    ):
        grid = (T.ceildiv(half, QUERIES), heads * PARTS, batch)
        with T.Kernel(device=size, block=grid, threads=THREADS) as (tile, place, b):
            arrived = T.alloc_flags((PARTS * size,))
            if size > 1:
                with T.Scale("device") as (rank, _):
                    send_halves(K, V, GK, GV, arrived, rank, size, batch, ring)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                attend(Q, K, V, Acc, State, Out, Sums, tile, place, b, rank, rank, size, True, size == 1, *how)
            if size > 2:
                for step in T.serial(1, size - 1):
                    wait_for(arrived, step, size, batch)
                    with T.Scale("block"), T.Scale("device") as (rank, _):
                        source = (rank + size - step) % size
                        attend(Q, GK, GV, Acc, State, Out, Sums, tile, place, b, rank, source, size, False, False, *how)
            if size > 1:
                wait_for(arrived, size - 1, size, batch)
                with T.Scale("block"), T.Scale("device") as (rank, _):
                    source = (rank + 1) % size
                    attend(Q, GK, GV, Acc, State, Out, Sums, tile, place, b, rank, source, size, False, True, *how)

    return sequence_attention


@T.macro
def attend(
    Q, K, V, Acc, State, Out, Sums, tile, place, b, rank, source, size, is_first, is_last, causal, zigzag, scale
):  # fmt: skip
    """One grid: a tile of queries continues with the keys of one rank; the first grid has this rank's keys."""
    half, heads, dim, dtype = Q.shape[2], int(Q.shape[3]), int(Q.shape[4]), str(Q.dtype)
    of_keys = int(K.shape[3])
    q, out = (T.alloc((QUERIES, dim), dtype, level="l1") for _ in range(2))
    k, v = (T.alloc((KEYS, dim), dtype, level="l1") for _ in range(2))
    scores = T.alloc((QUERIES, KEYS), "float32", level="l0")
    weights = T.alloc((QUERIES, KEYS), dtype, level="l0")
    acc = T.alloc((QUERIES, dim), "float32", level="l0")
    top, total = (T.alloc((QUERIES,), "float32", level="l0") for _ in range(2))
    # Under a causal mask the last tiles have the most to do, so they come first.
    first = (T.ceildiv(half, QUERIES) - 1 - tile) * QUERIES if causal else tile * QUERIES
    head, part = place // PARTS, place % PARTS
    mine = part_of(rank, part, size, zigzag)
    T.annotate_producer_reg_dealloc(LOADING)
    T.annotate_consumer_reg_alloc(COMPUTING)
    T.copy(Q[b, part, first : first + QUERIES, head, :], q)
    begin(top, total, acc)
    if not is_first:
        for i in T.Parallel(QUERIES):
            if first + i < half:
                top[i] = State[0, b, part, head, first + i]
                total[i] = State[1, b, part, head, first + i]
        for i, j in T.Parallel(QUERIES, dim):
            if first + i < half:
                acc[i, j] = Acc[b, part, first + i, head, j]
    # One loop over both halves: a loop around it would clear the state in each iteration, in the threads that multiply.
    # Their lengths are variables, as TileLang needs a minute to simplify expressions with inlined lengths.
    front, back, seen, left = (T.alloc_var("int32") for _ in range(4))
    front = T.ceildiv(keys_seen(mine, part_of(source, 0, size, zigzag), first + QUERIES, half, causal), KEYS)
    back = T.ceildiv(keys_seen(mine, part_of(source, 1, size, zigzag), first + QUERIES, half, causal), KEYS)
    for n in T.Pipelined(front + back, num_stages=2):
        h = T.if_then_else(n < front, 0, 1)
        at = (n - h * front) * KEYS
        theirs = part_of(source, h, size, zigzag)
        outer, inner = (b, h) if is_first else (source * PARTS + h, b)
        T.copy(K[outer, inner, at : at + KEYS, head * of_keys // heads, :], k)
        T.copy(V[outer, inner, at : at + KEYS, head * of_keys // heads, :], v)
        T.gemm(q, k, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        # The first query sees this number of keys of the tile, each next one sees one more; most tiles are seen as a
        # whole.
        left = half - at
        seen = T.if_then_else(theirs < mine, half, first + 1) - at if causal else left
        if T.min(seen, left) < KEYS:
            for i, j in T.Parallel(QUERIES, KEYS):
                scores[i, j] = T.if_then_else(j < T.min(seen + i, left), scores[i, j], NOTHING)
        softmax_step(scores, top, total, acc, scale)
        T.copy(scores, weights)
        T.gemm(weights, v, acc, policy=T.GemmWarpPolicy.FullRow)
    if is_last:
        for i, j in T.Parallel(QUERIES, dim):
            acc[i, j] = mean(acc[i, j], total[i])
        T.copy(acc, out)
        T.copy(out, Out[b, part, first : first + QUERIES, head, :])
        for i in T.Parallel(QUERIES):
            if first + i < half:
                Sums[b, part, head, first + i] = log_sum(top[i], total[i], scale)
    else:
        for i in T.Parallel(QUERIES):
            if first + i < half:
                State[0, b, part, head, first + i] = top[i]
                State[1, b, part, head, first + i] = total[i]
        for i, j in T.Parallel(QUERIES, dim):
            if first + i < half:
                Acc[b, part, first + i, head, j] = acc[i, j]
