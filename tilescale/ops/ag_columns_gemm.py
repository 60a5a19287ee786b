# SPDX-License-Identifier: MIT
"""All-gather of columns and GEMM: gather(a, dim=1) @ b, the inner dimension of a distributed over the ranks.

The program is sequential: a tile begins with the local part of the inner dimension, and continues with the parts of the
other ranks, in the order in which they are sent. By its schedule the copy queue sends the local columns to all ranks
meanwhile, in chunks of rows. Small GEMMs, and those whose parts of K are not multiples of 64 or whose N is not a
multiple of 8, gather first.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import strategy
from tilescale.ops.arguments import MULTIPLE, as_autocast, check_gemm
from tilescale.ops.gemm_operators import kernel_arguments
from tilescale.ops.gemm_tiles import CHUNK, CHUNKS, DEPTH, ROWS, GemmSpec, add_bias, on_chip_tiles, tiling
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import Choice, ChosenKernels, scheduled
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.row_counts import prepare
from tilescale.ops.unfused import gemm
from tilescale.ops.workspace import workspace_of
from tilescale.passes.overlap.schedule import QUEUE, Move
from tilescale.program.builder import Declaration
from tilescale.runtime.ahead import is_dry


@plain_calls_repeat
@collective
def all_gather_columns_matmul(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, group: Any = None
) -> torch.Tensor:
    """The columns of all ranks times b (+ bias), gathered while they are multiplied. Collective.

    Args:
        a: (M, K / ranks) on each rank: its part of the inner dimension, in the order of ranks; bfloat16 or float16, and
            float32 without overlap.
        b: (K, N), contiguous or the transpose of a contiguous matrix (`weight.t()` of a torch.nn.Linear). Each rank has
            its own.
        bias: (N,).
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (M, N), of the type of a. It can be differentiated: `matmul_reduce_scatter` is its backward.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    a, b, bias = as_autocast(a, b, bias)
    name = group_name(group)
    check_gemm(a, b, bias, parts=size_of(name))
    if a.shape[0] > ROWS:
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"supported: up to {ROWS}")
    if not a.shape[1]:
        raise ArgumentError("a has no columns", hint="give each rank as many, one at least")
    return _operator(a, b, bias, name)


@operator("all_gather_columns_matmul")
def _operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    team, (M, K), N = team_of(group), a.shape, b.shape[1]
    job = strategy.CollectiveGemm("all_gather", M, (N,), K, a.dtype)
    is_whole = not K % DEPTH and not N % MULTIPLE
    if is_whole and is_dry():
        prepare(job, (), _kernel, team, *kernel_arguments(a, b, bias, None, 1)[0])
    if not is_whole or not M or not strategy.overlaps(job, team):
        return gemm(operator_of("all_gather")(a, 1, group), b, bias, None)
    (gathered,), result = workspace_of(team).symmetric(a.dtype, (team.size, M, K)), a.new_empty(M, N)
    how, (left, right, added, *_) = kernel_arguments(a, b, bias, None, 1)
    _kernel(team, M, *how)(left, right, added, result, gathered)
    return result


@ChosenKernels
def _kernel(team: Team, rows: int, N: int, K: int, dtypes: Any, transposed: bool, biased: bool, *_: bool) -> Choice:
    return program, team, GemmSpec(N, K, dtypes[0], tiling(rows, 1, N, transposed), transposed, biased)


@_operator.register_fake
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """da^T = scatter(sum of b dc^T), whose rows are columns of a; db = gather(a)^T dc; the gather is repeated."""
    a, b = ctx.saved_tensors
    da = operator_of("matmul_reduce_scatter")(b, grad.t(), None, [], ctx.group, "").t()
    gathered = operator_of("all_gather")(a, 1, ctx.group)
    return da, (grad.t() @ gathered).t(), grad.sum(0) if ctx.bias else None


_operator.register_autograd(_backward, saves="a b")


@Declaration(3)
def program(size: int, of: GemmSpec) -> Any:
    """`sequential`, whose tiles wait for the parts of the inner dimension as they come to them."""
    move = Move("all_gather", ("A", "G"), chunk=CHUNK, chunks=CHUNKS, carrier=QUEUE, group=of.tiles.group)
    return scheduled(sequential(size, of), move)


def sequential(size: int, of: GemmSpec) -> Any:
    """The gather, and the GEMM: a tile goes through the local part of the inner dimension, then through the others as
    they are sent. `of.K`: of a part."""
    N, K, dtype, tiles, rows, steps = of.N, of.K, of.dtype, of.tiles, T.dynamic("rows"), -(-of.K // of.depth)

    @T.prim_func
    def all_gather_columns_matmul(
        A: T.Tensor((1, rows, K), dtype),
        B: T.Tensor((N, size * K) if of.transposed else (size * K, N), dtype),
        bias: T.Tensor((N if of.biased else 1,), dtype),
        C: T.Tensor((rows, N), dtype),
    ):
        with T.Kernel(device=size, block=tiles.grid(rows, N), threads=tiles.threads) as (column, row):
            G = T.alloc((size, rows, K), dtype, level="l2")
            with T.Scale("device"):
                T.all_gather(A, G)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, b, c, out = on_chip_tiles(of)
                m, n = row * tiles.m, column * tiles.n
                T.clear(c)
                for k in T.Pipelined(size * steps, num_stages=tiles.stages):
                    part, step = (rank + size - k // steps) % size, k % steps * of.depth
                    T.copy(G[part, m, step], a)
                    if of.transposed:
                        T.copy(B[n, part * K + step], b)
                    else:
                        T.copy(B[part * K + step, n], b)
                    T.gemm(a, b, c, transpose_B=of.transposed, policy=T.GemmWarpPolicy.FullRow)
                if of.biased:
                    add_bias(c, bias, n, N)
                T.copy(c, out)
                T.copy(out, C[m, n])

    return all_gather_columns_matmul
