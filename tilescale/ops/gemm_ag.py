# SPDX-License-Identifier: MIT
"""GEMM and all-gather of the result's columns: gather(a @ b, dim=1), the columns of b distributed over the ranks.

The copy queue sends each chunk of rows to all ranks when its tiles are done, into a workspace. Further blocks copy the
chunks of other ranks into the result as they arrive. Small GEMMs, and those whose K or N is not a multiple of 8, gather
afterwards.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import strategy
from tilescale.ops.arguments import MULTIPLE, as_autocast, check_product
from tilescale.ops.gemm_operators import kernel_arguments
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import Choice, ChosenKernels
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.products import CHUNK, CHUNKS, ROWS, GemmSpec, add_bias, in_parts, multiply, on_chip_tiles, tiling
from tilescale.ops.row_counts import prepare
from tilescale.ops.unfused import product
from tilescale.ops.workspace import workspace_of
from tilescale.runtime.ahead import is_dry


@plain_calls_repeat
@collective
def matmul_all_gather(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, group: Any = None
) -> torch.Tensor:
    """The columns of a @ b (+ bias) of all ranks, sent while they are multiplied. Collective.

    Args:
        a: (M, K), for a layer whose output is gathered the same on all ranks; bfloat16 or float16, and float32 without
            overlap.
        b: (K, N / ranks) on each rank: its own columns of the whole, contiguous or the transpose of a contiguous matrix
            (`weight.t()` of a torch.nn.Linear).
        bias: (N / ranks,), of these columns.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (M, N), of the type of a: the columns in the order of ranks. It can be differentiated: the gradient of the
        result is summed over the ranks, as for `all_gather`.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    a, b, bias = as_autocast(a, b, bias)
    check_product(a, b, bias)
    if a.shape[0] > ROWS:
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"supported: up to {ROWS}")
    return _operator(a, b, bias, group_name(group))


@operator("matmul_all_gather")
def _operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    team, (M, K), N = team_of(group), a.shape, b.shape[1]
    job = strategy.CollectiveGemm("reduce_scatter", M, (N,), K, a.dtype)  # each rank receives as much, and adds nothing
    is_whole = not K % MULTIPLE and not N % MULTIPLE
    if is_whole and is_dry():
        prepare(job, (), _kernel, team, *kernel_arguments(a, b, bias, None, 1)[0])
    if not is_whole or not M or not strategy.overlaps(job, team):
        return operator_of("all_gather")(product(a, b, bias, None), 1, group)
    (gathered,) = workspace_of(team).symmetric(a.dtype, (team.size, M, N))
    how, (left, right, added, *_) = kernel_arguments(a, b, bias, None, 1)
    result = a.new_empty(M, team.size * N)
    _kernel(team, M, *how)(left, right, added, gathered, result)
    return result


@ChosenKernels
def _kernel(team: Team, rows: int, N: int, K: int, dtypes: Any, transposed: bool, biased: bool, *_: bool) -> Choice:
    tiles = in_parts(tiling(rows, 1, N, transposed), rows)
    return program, team, GemmSpec(N, K, dtypes[0], tiles, transposed, biased)


@_operator.register_fake
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    return a.new_empty(a.shape[0], size_of(group) * b.shape[1])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """The local columns of the sum of all ranks' gradients are those of a GEMM."""
    a, b = ctx.saved_tensors
    own = operator_of("reduce_scatter")(grad, 1, "sum", ctx.group)
    return own @ b.t(), (own.t() @ a).t(), own.sum(0) if ctx.bias else None


_operator.register_autograd(_backward, saves="a b")


def program(size: int, of: GemmSpec) -> Any:
    """Blocks that multiply into `G`, from where the queue sends, and blocks that put all columns into the result."""
    N, K, dtype, tiles, rows = of.N, of.K, of.dtype, of.tiles, T.dynamic("rows")

    @T.prim_func
    def matmul_all_gather(
        A: T.Tensor((1, rows, K), dtype),
        B: T.Tensor(of.b_shape, dtype),
        bias: T.Tensor((N if of.biased else 1,), dtype),
        G: T.Tensor((size, rows, N), dtype),  # by source
        C: T.Tensor((rows, size * N), dtype),
    ):
        with T.Kernel(device=size, block=(tiles.count(rows, N), size + 1), threads=tiles.threads) as (tile, step):
            done, arrived = T.alloc_flags((CHUNKS,)), T.alloc_flags((size, CHUNKS))
            if size > 1:
                with T.Scale("device") as (rank, _):
                    send_done(G, done, arrived, rank, size, of)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, b, c, out = on_chip_tiles(of)
                m, n = tiles.at(tile, rows, N)
                if step == 0:
                    T.clear(c)
                    multiply(A, 0, m, B, n, a, b, c, K, tiles, of.transposed)
                    if of.biased:
                        add_bias(c, bias, n, N)
                    T.copy(c, out)
                    T.copy(out, G[rank, m, n])
                    T.signal(done[m // CHUNK])
                else:
                    source = (rank + size + 1 - step) % size  # the local columns first, then as they were sent
                    put(G, C, done, arrived, source, rank, m, n, of)

    return matmul_all_gather


@T.macro
def send_done(G, done, arrived, rank, size, of):
    """The queue sends chunks of rows of the local columns to all ranks, each when all of its tiles are done."""
    rows = G.shape[1]
    for i in T.serial(T.ceildiv(rows, CHUNK)):
        for step in T.serial(1, size):
            first, last = i * CHUNK, T.min(i * CHUNK + CHUNK, rows)
            T.copy(
                G[rank, first:last, :],
                G[rank, first:last, :],
                dst=(rank + step) % size,
                signal=arrived[rank, i],
                after=(done[i], ">=", of.tiles.count(last - first, of.N)),
            )


@T.macro
def put(G, C, done, arrived, source, rank, m, n, of):
    """A tile of the columns of one rank into the result, when its chunk is done here or has arrived."""
    rows, N, tiles, chunk = C.shape[0], of.N, of.tiles, m // CHUNK
    if source == rank:
        T.wait(done[chunk], ">=", tiles.count(T.min(CHUNK, rows - chunk * CHUNK), N))
    else:
        T.wait(arrived[source, chunk], ">=", 1)
    for i, j in T.Parallel(tiles.m, tiles.n):
        if m + i < rows and n + j < N:
            C[m + i, source * N + n + j] = G[source, m + i, n + j]
