# SPDX-License-Identifier: MIT
"""GEMMs of float8 matrices with block scales: one for each 128 numbers of a row of a, and for each 128 x 128 of b.

As `torch.nn.functional.scaled_mm` calls them: BlockWise1x128 and BlockWise128x128; the checkpoints of DeepSeek-V3 have
them (arXiv:2412.19437, section 3.3.2).
"""

from dataclasses import replace
from typing import Any

import torch

import tilescale.language as T
from tilescale.ops.arguments import BLOCK, dense
from tilescale.ops.gemm_tiles import COPIES, TILINGS, GemmSpec, GemmTiling, multiply, rescale
from tilescale.ops.grouped_float8 import scaled_program
from tilescale.ops.kernels import call_local, local_kernel
from tilescale.ops.layout import dtype_of, more_rows
from tilescale.ops.moe_tables import ALIGN


def scales_of_shards(of_a: torch.Tensor, shards: int) -> torch.Tensor:
    """The scales of the rows of several shards as programs load them: (shards, rows), or of blocks (shards, rows / 128,
    groups, 128), so that those of a tile's rows are one bulk copy."""
    if of_a.ndim == 1:
        return dense(of_a).view(shards, -1)
    rows = len(of_a) // shards
    more = max(-(-rows // BLOCK), 1) * BLOCK - rows
    padded = torch.nn.functional.pad(of_a.view(shards, rows, of_a.shape[1]), (0, 0, 0, more))
    return padded.unflatten(1, (-1, BLOCK)).transpose(2, 3).contiguous()


def scales_of_columns(of_b: torch.Tensor) -> torch.Tensor:
    """The scales of b as programs load them: (columns,), or of blocks (columns / 128, groups, copies)."""
    return of_b if of_b.ndim == 1 else of_b[..., None].expand(*of_b.shape, COPIES).contiguous()


def scaled_gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, of_a: torch.Tensor, of_b: torch.Tensor
) -> torch.Tensor:
    """a @ b + bias on this rank alone: the grouped GEMM of one expert. b is the transpose of a contiguous matrix."""
    (M, K), N = a.shape, b.shape[1]
    rows = -(-M // ALIGN) * ALIGN
    owners, made = of_a.new_zeros(rows // ALIGN, dtype=torch.int32), a.new_empty(rows, N, dtype=torch.bfloat16)
    given = more_rows(dense(a).view(torch.uint8), rows).view(a.dtype), more_rows(of_a, rows).t().contiguous()
    kernel = local_kernel(scaled_program, N, K, K, dtype_of(a))
    call_local(kernel, *given, dense(b.t())[None], of_b[None], owners, made)
    return made[:M] if bias is None else made[:M] + bias


# -- the loop of a tile ------------------------------------------------------------------------------------------------



def block_tiling(rows: int, gated: bool = False) -> GemmTiling:
    """The tiles of a GEMM with block scales: a step of b has one scale. Registers hold the sums and those of a
    step."""
    high, low = (t for t in TILINGS if t.n == BLOCK)
    return replace(low if rows <= low.m else high, stages=3 if gated else 4)


def scale_tiles(of: GemmSpec) -> tuple[Any, ...]:
    """On-chip tiles of `multiply_blocks`: the sums of a step, the scales of its rows and of each b, and the GEMMs of
    both. None without block scales."""
    if not of.blocks:
        return (None,) * 5
    rows = (of.tiles.m,)
    part, held = T.alloc((of.tiles.m, of.tiles.n), "float32", level="l0"), T.alloc(rows, "float32", level="l0")
    of_b, of_up = (T.alloc((COPIES,), "float32", level="l1") if n <= of.gated else None for n in range(2))
    return part, T.alloc(rows, "float32", level="l1"), of_b, of_up, held


@T.macro
def multiply_blocks(A, shard, m, of_A, B, Up, n, of_B, on_chip, of):
    """`multiply`, or `multiply_by_two`, with block scales: each step is scaled and added up in float32.

    Tensor cores add up float8 in fewer bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Scales are loaded ahead
    like the tiles.
    """
    a, b, up, c, c_up, part, scales, of_b, of_up, held = on_chip
    for k in T.Pipelined(T.ceildiv(of.K, BLOCK), num_stages=of.tiles.stages):
        T.copy(A[shard, m, k * BLOCK], a)
        T.copy(B[n, k * BLOCK], b)
        T.copy(of_A[shard, m // BLOCK, k, m % BLOCK], scales)
        T.copy(of_B[n // BLOCK, k, 0], of_b)
        if of.gated:
            T.copy(Up[n, k * BLOCK], up)
            T.copy(of_B[-(-of.N // BLOCK) + n // BLOCK, k, 0], of_up)
        T.gemm(a, b, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
        add_scaled(c, part, scales, of_b, held)
        if of.gated:
            T.gemm(a, up, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            add_scaled(c_up, part, scales, of_up, held)


@T.macro
def add_scaled(c, part, scales, of_b, held):
    """c += part, with the scales of its rows and the one of b."""
    for i in T.Parallel(c.shape[0]):
        held[i] = scales[i] * of_b[0]
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] += part[i, j] * held[i]


@T.macro
def multiply_scaled(A, shard, m, of_A, B, n, of_B, on_chip, rows, of):
    """c = A[shard, m:, :] B[:, n:] for one tile, with scales if they are float8."""
    a, b, c, part, scales, of_b, of_up, held = on_chip
    T.clear(c)
    if of.blocks:
        multiply_blocks(A, shard, m, of_A, B, None, n, of_B, (a, b, None, c, None, part, scales, of_b, of_up, held), of)
    else:
        multiply(A, shard, m, B, n, a, b, c, of.K, of.tiles, of.transposed)
        if of.scaled:
            rescale(c, of_A, shard, m, of_B, 0, n, rows, of.N)
