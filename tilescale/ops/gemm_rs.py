# SPDX-License-Identifier: MIT
"""GEMM and reduce-scatter: the sum of a @ b over the ranks, each of which is left with its rows.

The program is sequential. By its schedule rows of other ranks come first, and the copy queue sends each chunk of them
to its owner when its tiles are done. Local rows come last: to their accumulators the parts of the other ranks are
added, in float32 and in one order, so results have the same bits each time. Where a shard has several chunks, the grid
is persistent. Few rows are multiplied first: see strategy.py; between nodes chunk by chunk: see unfused.py.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.errors import ArgumentError
from tilescale.ops import strategy
from tilescale.ops.arguments import as_autocast, check_divides, check_gemm, check_out, result_type, scales_of
from tilescale.ops.block_gemm import block_tiling, multiply_scaled, scale_tiles
from tilescale.ops.dtensors import takes_dtensors
from tilescale.ops.float8 import Float8, of_any_size, of_gradients, spelled
from tilescale.ops.gemm_operators import check_has_backward, kernel_arguments, summing_operator
from tilescale.ops.gemm_tiles import (
    CHUNKS,
    ROWS,
    SCALED_CHUNKS,
    SUM_CHUNKS,
    GemmSpec,
    add_bias,
    at_once,
    concurrent_stores,
    in_parts,
    is_persistent,
    load_scales,
    multiply,
    on_chip_tiles,
    scale,
    tiling,
)
from tilescale.ops.group import collective, group_name, size_of
from tilescale.ops.kernels import Choice, ChosenKernels, scheduled
from tilescale.ops.layout import room_for
from tilescale.ops.operator import operator_of
from tilescale.ops.plain_calls import plain_calls_repeat
from tilescale.ops.row_counts import prepare
from tilescale.ops.unfused import Scales, summed_gemm
from tilescale.ops.workspace import workspace_of
from tilescale.passes.overlap.schedule import ACCUMULATORS, QUEUE, Move
from tilescale.program.builder import Declaration
from tilescale.runtime.ahead import is_dry


@plain_calls_repeat
@collective
@takes_dtensors(0, a=1, b=0, bias=None)
def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    float8: Float8 | None = None,
    out: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """This rank's rows of the sum of a @ b over all ranks (+ bias, once), sent while they are multiplied. Collective.

    Args:
        a: (M, K) on each rank, its own columns of the whole; M is a multiple of the number of ranks.
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
        (M / ranks, N), of the type of a, bfloat16 for float8. It can be differentiated, but with `scales`:
        `all_gather_matmul` is its backward.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    a, b, bias = as_autocast(a, b, bias)
    check_gemm(a, b, bias, scaled=scales is not None, rounds=float8 is not None)
    name = group_name(group)
    check_divides("a", a, 0, size_of(name))
    if a.shape[0] > ROWS * size_of(name):
        raise ArgumentError(f"a has {a.shape[0]} rows", hint=f"supported: up to {ROWS} for each rank")
    pair, recipe = None if scales is None else scales_of(scales, a, [b]), spelled(float8)
    check_out(out, (a.shape[0] // size_of(name), b.shape[1]), a, b, bias, dtype=result_type(a))
    if out is not None and not _operator.is_seen:
        return of_any_size(_scattered, a, b, bias, pair, name, recipe, out)
    made = _operator(a, b, bias, list(pair or ()), name, recipe)
    return made if out is None else out.copy_(made)


def _scattered(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    team: Team,
    out: torch.Tensor | None,
) -> torch.Tensor:
    rows, N, made = len(a) // team.size, b.shape[1], result_type(a)
    if not N:  # in the backward pass of a gather of columns that have no rows
        return room_for(out, (rows, N), a, made)
    job = strategy.CollectiveGemm("reduce_scatter", rows, (N,), a.shape[1], a.dtype)
    if is_dry():
        how, _ = kernel_arguments(a, b, bias, scales, team.size)
        prepare(job, (made,), _kernel, team, *how)
    if rows and not strategy.overlaps(job, team):
        return summed_gemm(a, b, bias, scales, team, scatters=True)
    result = room_for(out, (rows, N), a, made)
    if rows:
        space, shape = workspace_of(team), (team.size, rows, N)
        (parts,), (inbox,) = space.own(made, shape), space.symmetric(made, shape)
        how, given = kernel_arguments(a, b, bias, scales, team.size)
        _kernel(team, rows, *how)(*given, result.unsqueeze(0), parts, inbox)
    return result


_operator = summing_operator("matmul_reduce_scatter", _scattered, lambda a, group: a.shape[0] // size_of(group))


@ChosenKernels
def _kernel(
    team: Team, rows: int, N: int, K: int, dtypes: tuple[str, str], transposed: bool, biased: bool, blocks: bool
) -> Choice:
    if blocks:
        tiles = in_parts(block_tiling(rows), rows)
        return program, team, GemmSpec(N, K, dtypes[0], tiles, True, biased, other=dtypes[1], blocks=True)
    adds = K * getattr(torch, dtypes[0]).itemsize
    tiles = in_parts(tiling(rows, team.size, N, transposed, adds=adds), rows)
    of = GemmSpec(N, K, dtypes[0], tiles, transposed, biased, other=dtypes[1])
    if is_persistent(rows, SCALED_CHUNKS if of.scaled else SUM_CHUNKS):
        return program, team, concurrent_stores(of), at_once()
    return program, team, of


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """da = gather(dc) b^T; db = a^T gather(dc); the bias was added once, so its gradient is that of all rows."""
    check_has_backward(ctx)
    a, b = ctx.saved_tensors
    how = True, ctx.group, "", False, of_gradients(ctx.float8)
    da, gathered = operator_of("all_gather_matmul")(grad, [b.t()], None, [], *how)
    # The transpose of (N, K), the layout of a torch.nn.Linear's weight.
    db = (gathered.t() @ a).t()
    return da, db, gathered.sum(0) if ctx.bias else None


_operator.register_autograd(_backward, saves="a b")


@Declaration(5)
def program(size: int, of: GemmSpec, blocks: int = 0) -> Any:
    """`sequential`, whose blocks add the other ranks' parts to their accumulators; `blocks` persistent ones, 0: one for
    each tile."""
    how = Move(
        *("reduce_scatter", ("parts", "C")),
        chunk=of.tiles.group_rows,
        carrier=QUEUE,
        adds=ACCUMULATORS,
        group=of.tiles.group,
        blocks=blocks or None,
        chunks=CHUNKS,
    )
    return scheduled(sequential(size, of, loads_scales_first=blocks > 0), how)


def sequential(size: int, of: GemmSpec, *, loads_scales_first: bool = False) -> Any:
    """The GEMM of all ranks' rows, then the sum of each rank's over the ranks."""
    N, K, dtype, tiles, rows = of.N, of.K, of.dtype, of.tiles, T.dynamic("rows")
    kind, scales, first = "float32" if of.scaled else dtype, of.scales(size), of.scaled and loads_scales_first

    @T.prim_func
    def matmul_reduce_scatter(
        A: T.Tensor((size, rows, K), dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        bias: T.Tensor((N if of.biased else 1,), of.result),
        of_A: T.Tensor((size, rows) if first else scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        C: T.Tensor((1, rows, N), of.result),
    ):
        with T.Kernel(device=size, block=(*tiles.grid(rows, N), size), threads=tiles.threads) as (column, row, owner):
            parts = T.alloc((size, rows, N), of.result, level="l2")
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a, b, c, out = on_chip_tiles(of)
                m, n = row * tiles.m, column * tiles.n
                if first:
                    row_scales, column_scales = (T.alloc((high,), "float32", level="l0") for high in (tiles.m, tiles.n))
                    T.clear(c)
                    load_scales(row_scales, column_scales, of_A, owner, m, of_B, n, rows, N)
                    multiply(A, owner, m, B, n, a, b, c, K, tiles, of.transposed)
                    scale(c, row_scales, column_scales)
                else:
                    multiply_scaled(A, owner, m, of_A, B, n, of_B, (a, b, c, *scale_tiles(of)), rows, of)
                if of.biased:
                    if owner == rank:
                        add_bias(c, bias, n, N)
                T.copy(c, out)
                T.copy(out, parts[owner, m, n])
            with T.Scale("device"):
                T.reduce_scatter(parts, C)

    return matmul_reduce_scatter
