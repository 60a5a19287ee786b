# SPDX-License-Identifier: MIT
"""GEMM and all-gather of the result's columns: gather(a @ b, dim=1), the columns of b distributed over the ranks.

The program is sequential. By its schedule the copy queue sends each chunk of rows to all ranks when its tiles are done,
into a workspace, from which a second grid stores the chunks of other ranks as they arrive. Small GEMMs, and those whose
K or N is not a multiple of 8, gather afterwards.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import strategy
from tilescale.ops.arguments import MULTIPLE, as_autocast, check_gemm
from tilescale.ops.gemm_operators import kernel_arguments
from tilescale.ops.gemm_tiles import CHUNK, CHUNKS, ROWS, GemmSpec, add_bias, in_parts, multiply, on_chip_tiles, tiling
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.kernels import Choice, ChosenKernels, scheduled
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.row_counts import prepare
from tilescale.ops.unfused import gemm
from tilescale.ops.workspace import workspace_of
from tilescale.passes.overlap.schedule import SOURCE, Move
from tilescale.program.builder import Declaration
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
    check_gemm(a, b, bias)
    if a.shape[0] > ROWS:
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"supported: up to {ROWS}")
    return _operator(a, b, bias, group_name(group))


@operator("matmul_all_gather")
def _operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    team, (M, K), N = team_of(group), a.shape, b.shape[1]
    job = strategy.CollectiveGemm("reduce_scatter", M, (N,), K, a.dtype)  # each rank receives as much, and adds nothing
    is_whole = team.size > 1 and not K % MULTIPLE and not N % MULTIPLE
    if is_whole and is_dry():
        prepare(job, (), _kernel, team, *kernel_arguments(a, b, bias, None, 1)[0])
    if not is_whole or not M or not strategy.overlaps(job, team):
        return operator_of("all_gather")(gemm(a, b, bias, None), 1, group)
    space, result = workspace_of(team), a.new_empty(M, team.size, N)
    (local,), (gathered,) = space.own(a.dtype, (1, M, N)), space.symmetric(a.dtype, (team.size, M, N))
    how, (left, right, added, *_) = kernel_arguments(a, b, bias, None, 1)
    _kernel(team, M, *how)(left, right, added, result, local, gathered)
    return result.flatten(1)


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


@Declaration(3, grids=2)
def program(size: int, of: GemmSpec) -> Any:
    """`sequential`, whose chunks of rows are sent when their tiles are done."""
    move = Move("all_gather", ("local", "G"), chunk=CHUNK, chunks=CHUNKS, local=SOURCE, group=of.tiles.group)
    return scheduled(sequential(size, of), move)


def sequential(size: int, of: GemmSpec) -> Any:
    """The GEMM, which stores the local columns of the result, the gather, and a grid that stores the others."""
    N, K, dtype, tiles, rows = of.N, of.K, of.dtype, of.tiles, T.dynamic("rows")

    @T.prim_func
    def matmul_all_gather(
        A: T.Tensor((1, rows, K), dtype),
        B: T.Tensor(of.b_shape, dtype),
        bias: T.Tensor((N if of.biased else 1,), dtype),
        C: T.Tensor((rows, size, N), dtype),
    ):
        with T.Kernel(device=size, block=tiles.grid(rows, N), threads=tiles.threads) as (column, row):
            local = T.alloc((1, rows, N), dtype, level="l2")
            G = T.alloc((size, rows, N), dtype, level="l2")
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, b, c, out = on_chip_tiles(of)
                m, n = row * tiles.m, column * tiles.n
                T.clear(c)
                multiply(A, 0, m, B, n, a, b, c, K, tiles, of.transposed)
                if of.biased:
                    add_bias(c, bias, n, N)
                T.copy(c, out)
                T.copy(out, local[0, m, n])
                T.copy(out, C[m : m + tiles.m, rank, n : n + tiles.n])
            with T.Scale("device"):
                T.all_gather(local, G)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                m, n = row * tiles.m, column * tiles.n
                for step in T.serial(1, size):
                    T.copy(
                        G[(rank + size - step) % size, m : m + tiles.m, n : n + tiles.n],
                        C[m : m + tiles.m, (rank + size - step) % size, n : n + tiles.n],
                    )

    return matmul_all_gather
