# SPDX-License-Identifier: MIT
"""All-gather and product: gather(a) @ b, the rows of a lying over the ranks.

The copy queue sends the own rows to everybody, chunk by chunk, while the grid multiplies them where they lie; rows of
others come into a workspace and are multiplied as they arrive. Nobody copies own rows, and no processor moves data.
Few rows are gathered first: see small.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops import small
from tilescale.ops.arguments import check_like, check_product, dense, operand
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.products import CHUNK, CHUNKS, DEPTH, ROWS, Tiling, activate, add_bias, multiply, tiling
from tilescale.ops.workspace import workspace_of

ACTIVATIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""What may become of a result before it is stored, as PyTorch has it."""


def all_gather_matmul(
    a: torch.Tensor, b: Any, *, bias: Any = None, activation: str | None = None, group: Any = None
) -> torch.Tensor | list[torch.Tensor]:
    """The rows of all ranks times b (+ bias), gathered while they are multiplied. Collective.

    Args:
        a: (rows, K) on each rank, the same number of rows on all, contiguous or not; anywhere in device memory.
        b: (K, N), contiguous or the transpose of a contiguous matrix (`weight.t()` of a torch.nn.Linear); K and N are
            multiples of 8. Or a list of such matrices, each with its own N: one gather serves them all.
        bias: (N,), or a list like b with None where there is none.
        activation: "relu", "silu" or "gelu_tanh", of all results, in float32; its backward multiplies once more.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (ranks * rows, N), or a list of them if b is one. It can be differentiated: `matmul_reduce_scatter` is its
        backward.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    weights = list(b) if isinstance(b, Sequence) else [b]
    biases = list(bias) if isinstance(bias, Sequence) else [bias] * len(weights)
    if not weights or len(biases) != len(weights):
        raise ArgumentError(f"b is {len(weights)} matrices, bias {len(biases)}", hint="one bias, or None, for each")
    for i, (weight, added) in enumerate(zip(weights, biases, strict=True)):
        check_product(a, weight, added, f"b[{i}]" if isinstance(b, Sequence) else "b")
        check_like(f"b[{i}]", weight, "b[0]", weights[0])
    if a.shape[0] > ROWS:
        raise ArgumentError(f"a has {a.shape[0]} rows on each rank", hint=f"served are up to {ROWS}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is {activation!r}", hint=f"served are {', '.join(ACTIVATIONS)}")
    joined, name = _joined(weights, biases), group_name(group)
    results = torch.ops.tilescale.all_gather_matmul(a, weights, joined, False, name, activation or "")
    return results if isinstance(b, Sequence) else results[0]


def _joined(weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> torch.Tensor | None:
    """One bias for all columns; None if there is none."""
    if len(biases) == 1 or all(bias is None for bias in biases):
        return biases[0]
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(w.shape[1]) if bias is None else bias for w, bias in pairs])


@torch.library.custom_op("tilescale::all_gather_matmul", mutates_args=())
def _operator(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    keeps: bool,
    group: str,
    activation: str,
) -> list[torch.Tensor]:
    """The products, and behind them the gathered rows if asked to keep them; one bias for all columns."""
    team = team_of(group)
    (rows, K), dtype = a.shape, str(a.dtype).removeprefix("torch.")
    widths = [weight.shape[1] for weight in weights]
    biases = [None] * len(weights) if bias is None else dense(bias).split(widths)
    if team.size > 1 and a.nbytes and small.is_whole(a.nbytes, team):
        whole = small.gathered(dense(a), team)
        products = [whole @ w if b is None else torch.addmm(b, whole, w) for w, b in zip(weights, biases, strict=True)]
        products = [ACTIVATIONS[activation](c) for c in products] if activation else products
        return [*products, whole] if keeps else products
    own = dense(a).view(1, rows, K)
    (gathered,) = workspace_of(team).symmetric(a.dtype, (team.size, rows, K))
    results = [a.new_empty(team.size, rows, weight.shape[1]) for weight in weights]
    # The largest product has the most time to hide the gather, so it is the one that gathers.
    order = sorted(range(len(weights)), key=lambda i: -widths[i]) if rows else []
    for i in order:
        right, transposed = operand(weights[i])
        tiles = tiling(rows, 1, widths[i], transposed)
        given = (widths[i], K, dtype, tiles, transposed, bias is not None, i == order[0], activation)
        added = right.view(-1)[:1] if biases[i] is None else biases[i]
        kernel(program, team, *given)(own, gathered, right, added, results[i])
    flat = [result.flatten(0, 1) for result in results]
    if keeps:
        gathered[team.rank].copy_(own[0])
        flat.append(gathered.flatten(0, 1).clone())
    return flat


@_operator.register_fake
def _(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    keeps: bool,
    group: str,
    activation: str,
) -> list[torch.Tensor]:
    rows = a.shape[0] * size_of(group)
    made = [a.new_empty(rows, weight.shape[1]) for weight in weights]
    return [*made, a.new_empty(rows, a.shape[1])] if keeps else made


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    a, weights, bias, _, ctx.group, ctx.activation = inputs
    # With an activation its argument is made again, so the bias is needed.
    ctx.save_for_backward(a, bias if ctx.activation else None, *weights)
    ctx.biased = bias is not None


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """da = scatter(sum of dc b^T); db = gather(a)^T dc; the gather is repeated rather than kept."""
    a, bias, *weights = ctx.saved_tensors
    grads = grads[: len(weights)]
    if ctx.activation:
        before = torch.ops.tilescale.all_gather_matmul(a, weights, bias, False, ctx.group, "")
        slope = _SLOPES[ctx.activation]
        grads = [slope(grad, x) for grad, x in zip(grads, before, strict=True)]
    joined = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
    across = weights[0].t() if len(weights) == 1 else torch.cat([w.t() for w in weights])
    da = torch.ops.tilescale.matmul_reduce_scatter(joined, across, None, ctx.group)
    gathered = torch.ops.tilescale.all_gather(a, 0, ctx.group)
    # As the transpose of (N, K), which is how the weight of a torch.nn.Linear lies.
    db = [(grad.t() @ gathered).t() for grad in grads]
    return da, db, joined.sum(0) if ctx.biased else None, None, None, None


_SLOPES = {
    "relu": lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0),
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}

_operator.register_autograd(_backward, setup_context=_setup)


def program(
    size: int,
    N: int,
    K: int,
    dtype: str,
    tiles: Tiling,
    transposed: bool,
    biased: bool,
    gathers: bool,
    activation: str = "",
) -> Any:
    """Own rows first, then those of the others as they arrive; or, if it does not gather, as they are there."""
    rows, b_tile = T.dynamic("rows"), (tiles.n, DEPTH) if transposed else (DEPTH, tiles.n)
    is_activated = bool(activation)
    # With a condition around it, the result does not lie where the steps were.
    own_stages = tiles.stages if size <= 2 else tiles.stages - 1

    @T.prim_func
    def all_gather_matmul(
        A: T.Tensor((1, rows, K), dtype),
        G: T.Tensor((size, rows, K), dtype),
        B: T.Tensor((N, K) if transposed else (K, N), dtype),
        bias: T.Tensor((N if biased else 1,), dtype),
        C: T.Tensor((size, rows, N), dtype),
    ):
        grid = (*tiles.grid(rows, N), max(size - 1, 1))
        with T.Kernel(device=size, block=grid, threads=tiles.threads) as (tile, group, turn):
            arrived = T.alloc_flags((size, CHUNKS))
            if gathers and size > 1:
                with T.Scale("device") as (rank, _):
                    for step in T.serial(1, size):
                        for i in T.serial(T.ceildiv(rows, CHUNK)):
                            first, last = i * CHUNK, T.min(i * CHUNK + CHUNK, rows)
                            T.copy(
                                A[0, first:last, :],
                                G[rank, first:last, :],
                                dst=(rank + step) % size,
                                signal=arrived[rank, i],
                            )
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a = T.alloc((tiles.m, DEPTH), dtype, level="l1")
                b = T.alloc(b_tile, dtype, level="l1")
                c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
                out = T.alloc((tiles.m, tiles.n), dtype, level="l1")
                m, n = tiles.place(tile, group)
                if size <= 2 or turn == 0:
                    T.clear(c)
                    multiply(A, 0, m, B, n, a, b, c, K, own_stages, transposed)
                    if biased:
                        add_bias(c, bias, n, N)
                    if is_activated:
                        activate(c, activation)
                    T.copy(c, out)
                    T.copy(out, C[rank, m, n])
            with T.Scale("device"):  # a phase for the own rows and one for the others: each loop gets its producer
                pass
            if size > 1:
                with T.Scale("block"), T.Scale("device") as (rank, _):
                    a = T.alloc((tiles.m, DEPTH), dtype, level="l1")
                    b = T.alloc(b_tile, dtype, level="l1")
                    c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
                    out = T.alloc((tiles.m, tiles.n), dtype, level="l1")
                    # The rank before was the first to send here, the one before it the second.
                    shard = (rank + size - 1 - turn) % size
                    m, n = tiles.place(tile, group)
                    T.clear(c)
                    if gathers:
                        T.wait(arrived[shard, m // CHUNK], ">=", 1)
                    multiply(G, shard, m, B, n, a, b, c, K, tiles.stages, transposed)
                    if biased:
                        add_bias(c, bias, n, N)
                    if is_activated:
                        activate(c, activation)
                    T.copy(c, out)
                    T.copy(out, C[shard, m, n])

    return all_gather_matmul
