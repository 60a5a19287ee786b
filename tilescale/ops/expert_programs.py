# SPDX-License-Identifier: MIT
"""Grouped GEMMs of SwiGLU experts, with the activation in their epilogues.

Rows are in the order of `moe_dispatch`, each tile has those of one expert. An expert's `gate_up` has the rows of its
gate, then those that the gate multiplies.
"""

import math
from typing import Any

import tilescale.language as T
from tilescale.ops.grouped_gemm import STAGES
from tilescale.ops.moe_tables import ALIGN
from tilescale.ops.products import DEPTH

COLUMNS, LEAST_COLUMNS = 128, 16
"""Columns of a block's tile, at most and at least; they divide those of the experts. Eight columns have no layout of a
right operand that is not transposed."""


def columns_of(N: int) -> int:
    """Columns of a block's tile for N columns."""
    return math.gcd(N, COLUMNS)


def gated_program(size: int, N: int, K: int, dtype: str, keeps: bool) -> Any:
    """C[m] = silu(A[m] gate^T) * (A[m] up^T) of the owner of m; H has both products if it `keeps` them."""
    room, experts, wide = T.dynamic("room"), T.dynamic("experts"), columns_of(N)

    @T.prim_func
    def gated_experts(
        A: T.Tensor((room, K), dtype),
        B: T.Tensor((experts, 2 * N, K), dtype),
        owners: T.Tensor((room // ALIGN,), "int32"),
        H: T.Tensor((room, 2 * N) if keeps else (1, 1), dtype),
        C: T.Tensor((room, N), dtype),
    ):
        with T.Kernel(device=size, block=(N // wide, room // ALIGN), threads=256) as (column, tile):
            a = T.alloc((ALIGN, DEPTH), dtype, level="l1")
            b, up = (T.alloc((wide, DEPTH), dtype, level="l1") for _ in range(2))
            c, c_up = (T.alloc((ALIGN, wide), "float32", level="l0") for _ in range(2))
            out, out_up = (T.alloc((ALIGN, wide), dtype, level="l1") for _ in range(2))
            if owners[tile] >= 0:
                T.clear(c)
                T.clear(c_up)
                for k in T.Pipelined(T.ceildiv(K, DEPTH), num_stages=STAGES):
                    T.copy(A[tile * ALIGN, k * DEPTH], a)
                    T.copy(B[owners[tile], column * wide, k * DEPTH], b)
                    T.copy(B[owners[tile], N + column * wide, k * DEPTH], up)
                    T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.gemm(a, up, c_up, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                if keeps:
                    T.copy(c, out)
                    T.copy(out, H[tile * ALIGN, column * wide])
                    T.copy(c_up, out_up)
                    T.copy(out_up, H[tile * ALIGN, N + column * wide])
                for i, j in T.Parallel(ALIGN, wide):
                    c[i, j] = c[i, j] / (1 + T.exp(-c[i, j])) * c_up[i, j]
                T.copy(c, out)
                T.copy(out, C[tile * ALIGN, column * wide])

    return gated_experts


def gated_gradient_program(size: int, N: int, K: int, dtype: str) -> Any:
    """The gradients of both products of `gated_program`, and of rows' weights, from those of the sums of rows.

    With E = D B, and act = silu(gate) * up of H: DH from w E, C = w act, and DW[n] = the sum over columns of tile n of
    E * act.
    """
    room, experts, wide = T.dynamic("room"), T.dynamic("experts"), columns_of(N)

    @T.prim_func
    def gated_experts_gradient(
        D: T.Tensor((room, K), dtype),
        B: T.Tensor((experts, K, N), dtype),
        owners: T.Tensor((room // ALIGN,), "int32"),
        W: T.Tensor((room,), "float32"),
        H: T.Tensor((room, 2 * N), dtype),
        DH: T.Tensor((room, 2 * N), dtype),
        C: T.Tensor((room, N), dtype),
        DW: T.Tensor((N // wide, room), "float32"),
    ):
        with T.Kernel(device=size, block=(N // wide, room // ALIGN), threads=256) as (column, tile):
            a, b = T.alloc((ALIGN, DEPTH), dtype, level="l1"), T.alloc((DEPTH, wide), dtype, level="l1")
            c = T.alloc((ALIGN, wide), "float32", level="l0")
            gate, up, out = (T.alloc((ALIGN, wide), dtype, level="l1") for _ in range(3))
            share, total = (T.alloc((ALIGN,), "float32", level="l0") for _ in range(2))
            if owners[tile] >= 0:
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K, DEPTH), num_stages=STAGES):
                    T.copy(D[tile * ALIGN, k * DEPTH], a)
                    T.copy(B[owners[tile], k * DEPTH, column * wide], b)
                    T.gemm(a, b, c, policy=T.GemmWarpPolicy.FullRow)
                T.copy(H[tile * ALIGN, column * wide], gate)
                T.copy(H[tile * ALIGN, N + column * wide], up)
                for i in T.Parallel(ALIGN):
                    share[i] = W[tile * ALIGN + i]
                for i, j in T.Parallel(ALIGN, wide):
                    g, u, e = T.cast(gate[i, j], "float32"), T.cast(up[i, j], "float32"), c[i, j] * share[i]
                    s = 1 / (1 + T.exp(-g))
                    gate[i, j] = e * u * s * (1 + g * (1 - s))
                    up[i, j] = e * g * s
                    out[i, j] = share[i] * g * s * u
                    c[i, j] = c[i, j] * g * s * u
                T.reduce_sum(c, total, dim=1)
                for i in T.Parallel(ALIGN):
                    DW[column, tile * ALIGN + i] = total[i]
                T.copy(gate, DH[tile * ALIGN, column * wide])
                T.copy(up, DH[tile * ALIGN, N + column * wide])
                T.copy(out, C[tile * ALIGN, column * wide])

    return gated_experts_gradient
