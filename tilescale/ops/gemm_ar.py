# SPDX-License-Identifier: MIT
"""GEMM and all-reduce: the sum of a @ b over the ranks, on every rank.

The program is sequential. Its schedule lets a block sum the tile that it has multiplied with those of its peers, while
it multiplies the next one, or others do. Few rows have a program of their own: see few_rows.py. Other small GEMMs
are multiplied first: see strategy.py; between nodes chunk by chunk: see unfused.py.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import few_rows, strategy
from tilescale.ops.arguments import as_autocast, check_gemm, check_out, check_strided, result_type, scales_of
from tilescale.ops.block_gemm import block_tiling, multiply_scaled, scale_tiles
from tilescale.ops.dtensors import takes_dtensors
from tilescale.ops.float8 import Float8, gradients_of_times, of_any_size, spelled
from tilescale.ops.gemm_operators import check_has_backward, kernel_arguments, summing_operator
from tilescale.ops.gemm_tiles import ROWS, GemmSpec, add_bias, at_once, on_chip_tiles, summed_tiling
from tilescale.ops.group import collective, group_name, size_of
from tilescale.ops.kernels import Choice, ChosenKernels, scheduled
from tilescale.ops.layout import delivered, room_for
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.replicated import used_in_parts
from tilescale.ops.row_counts import prepare
from tilescale.ops.unfused import Scales, summed_gemm
from tilescale.passes.overlap.schedule import COLLECTIVE, Move
from tilescale.program.builder import Declaration
from tilescale.runtime.ahead import is_dry


@plain_calls_repeat
@collective
@takes_dtensors(None, a=-1, b=0, bias=None)
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    float8: Float8 | None = None,
    out: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """The sum of a @ b over all ranks (+ bias, once), on every rank. Collective.

    Args:
        a: (..., K) on each rank, its own columns of the whole.
        b: (K, N), contiguous or the transpose of a contiguous matrix (`weight.t()` of a torch.nn.Linear). It is copied
            in each call where K or N is not a multiple of 8, of 16 in float8.
        bias: (N,), the same on all ranks.
        scales: where a and b are float8_e4m3fn, their factors, float32: one number, or one for each row of a and for
            each column of b; or one for each 128 numbers of a row of a, (M, K / 128), and for each 128 x 128 of b, (K /
            128, N / 128), rounded up. Then b is the transpose of a contiguous matrix.
        float8: how bfloat16 matrices are rounded to float8 before the GEMM, `Float8()`.
        out: the result's memory, where no gradients are recorded, and no other tensor's. If it is contiguous and N a
            multiple of 8 (16 in float8), overlapped GEMMs write it without a copy.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        (..., N), of the type of a, bfloat16 for float8. It can be differentiated, but with `scales`: the gradient of
        the result is assumed to be the same on all ranks, as in a tensor-parallel layer.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_strided("a", a)
    outer = a.shape[:-1] if a.ndim > 2 else None
    if outer is not None:
        a = a.flatten(0, -2)
    a, b, bias = as_autocast(a, b, bias)
    check_gemm(a, b, bias, scaled=scales is not None, rounds=float8 is not None)
    name = group_name(group)
    if a.shape[0] > ROWS * size_of(name):
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"supported: up to {ROWS} for each rank")
    pair, recipe = None if scales is None else scales_of(scales, a, [b]), spelled(float8)
    check_out(out, (*(outer or a.shape[:1]), b.shape[1]), a, b, bias, dtype=result_type(a))
    if out is not None and not _operator.is_seen:
        place = out.view(-1, b.shape[1]) if out.is_contiguous() else None
        return delivered(of_any_size(_summed, a, b, bias, pair, name, recipe, place).view(out.shape), out)
    made = _operator(a, b, bias, list(pair or ()), name, recipe)
    if outer is not None:
        made = made.unflatten(0, outer)
    return made if out is None else out.copy_(made)


def _summed(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    team: Team,
    out: torch.Tensor | None,
) -> torch.Tensor:
    rows, N, made = len(a), b.shape[1], result_type(a)
    if not rows:
        return a.new_empty(0, N, dtype=made)
    job = _job(team, rows, N, a.shape[1], a.dtype)
    if is_dry():
        how, _ = kernel_arguments(a, b, bias, scales, 1)
        prepare(job, (made,), _kernel, team, *how, parts=team.size)
    if not strategy.overlaps(job, team):
        return summed_gemm(a, b, bias, scales, team)
    result, (how, given) = room_for(out, (rows, N), a, made), kernel_arguments(a, b, bias, scales, 1)
    _kernel(team, rows, *how)(*given, result)
    return result


_operator = summing_operator("matmul_all_reduce", _summed, lambda a, group: a.shape[0])


def _job(team: Team, rows: int, N: int, K: int, dtype: torch.dtype) -> strategy.CollectiveGemm:
    return strategy.CollectiveGemm("allreduce", -(-rows // team.size), (N,), K, dtype)


@ChosenKernels
def _kernel(
    team: Team, rows: int, N: int, K: int, dtypes: tuple[str, str], transposed: bool, biased: bool, blocks: bool
) -> Choice:
    if not blocks and strategy.takes_one_launch(_job(team, rows, N, K, getattr(torch, dtypes[0])), team):
        tiles, parts = few_rows.few_rows_tiling(rows, N)
        return few_rows.program, team, GemmSpec(N, K, dtypes[0], tiles, transposed, biased, other=dtypes[1]), parts
    tiles, grid = summed_tiling(rows, N, team.size)
    if blocks:
        tiles = block_tiling(rows)
        grid = at_once() if -(-rows // tiles.m) * tiles.columns(N) > at_once() else 0
    of = GemmSpec(N, K, dtypes[0], tiles, transposed, biased, other=dtypes[1], blocks=blocks)
    return program, team, of, grid


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    check_has_backward(ctx)
    a, b = ctx.saved_tensors
    mine = used_in_parts(grad, ctx.group) if torch.is_grad_enabled() else grad
    return *gradients_of_times(mine, a, b, ctx.float8), grad.sum(0) if ctx.bias else None


_operator.register_autograd(_backward, saves="a b")


@Declaration(5)
def program(size: int, of: GemmSpec, blocks: int) -> Any:
    """`sequential`, whose tiles are summed before they are stored, by `blocks` persistent blocks; 0: one each."""
    move = Move("allreduce", ("C", "C"), carrier=COLLECTIVE, group=of.tiles.group, blocks=blocks or None)
    return scheduled(sequential(size, of), move)


def sequential(size: int, of: GemmSpec) -> Any:
    """The GEMM, then the sum over the ranks."""
    N, K, tiles, rows = of.N, of.K, of.tiles, T.dynamic("rows")
    kind, scales = "float32" if of.scaled else of.dtype, of.scales(1)

    @T.prim_func
    def matmul_all_reduce(
        A: T.Tensor((1, rows, K), of.dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        bias: T.Tensor((N if of.biased else 1,), of.result),
        of_A: T.Tensor(scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        C: T.Tensor((rows, N), of.result),
    ):
        with T.Kernel(device=size, block=tiles.grid(rows, N), threads=tiles.threads) as (column, row):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, b, c, out = on_chip_tiles(of)
                m, n = row * tiles.m, column * tiles.n
                multiply_scaled(A, 0, m, of_A, B, n, of_B, (a, b, c, *scale_tiles(of)), rows, of)
                if of.biased:
                    add_bias(c, bias, n, N, once=rank == 0)
                T.copy(c, out)
                T.copy(out, C[m, n])
            with T.Scale("device"):
                T.allreduce(C)

    return matmul_all_reduce
