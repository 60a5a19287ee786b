# SPDX-License-Identifier: MIT
"""The loop of a tile of a GEMM with block scales: see block_gemm.py."""

from dataclasses import replace
from typing import Any

import tilescale.language as T
from tilescale.ops.arguments import BLOCK
from tilescale.ops.products import COPIES, TILINGS, GemmSpec, GemmTiling, multiply, rescale


def block_tiling(rows: int, gated: bool = False) -> GemmTiling:
    """The tiles of a GEMM with block scales: a step of b has one scale. Registers hold the sums and those of a
    step."""
    high, low = (t for t in TILINGS if t.n == BLOCK)
    return replace(low if rows <= low.m else high, stages=3 if gated else 4)


def scale_tiles(of: GemmSpec) -> tuple[Any, ...]:
    """On-chip tiles of `multiply_blocks`: the sums of a step, the scales of its rows and of each b, and the products of
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
