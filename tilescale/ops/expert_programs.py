# SPDX-License-Identifier: MIT
"""Programs of a layer of SwiGLU experts: the whole layer, and its grouped GEMMs with the activation in their epilogues.

Rows are in the order of `moe_dispatch`, each tile has those of one expert. An expert's `gate_up` has the rows of its
gate, then those that the gate multiplies.
"""

import math
from typing import Any

import tilescale.language as T
from tilescale.ops import grouped_gemm
from tilescale.ops.grouped_gemm import STAGES
from tilescale.ops.moe_tables import ALIGN, returns_grid, tables_grids, whole
from tilescale.ops.persistent import turns_of
from tilescale.ops.products import DEPTH, sigmoid, swiglu
from tilescale.ops.row_exchange import UNIT_BYTES, scatter_grid, sum_grid

COLUMNS, LEAST_COLUMNS = 128, 16
"""Columns of a block's tile, at most and at least; they divide those of the experts. Eight columns have no layout of a
right operand that is not transposed."""

GATED_STAGES = 4
"""Pipeline stages of a GEMM with gates, whose result has half of the columns: on an H200 three take 8 % longer."""


def columns_of(N: int) -> int:
    """Columns of a block's tile for N columns."""
    return math.gcd(N, COLUMNS)


@T.macro
def gated_grid(A, B, owners, used, H, C, size, wide, keeps, blocks):
    """C[m] = silu(A[m] gate^T) * (A[m] up^T) of the owner of m, of the `used` tiles; H has both products if it `keeps`
    them.

    A persistent grid: a block loads its next tile while it stores this one.
    """
    dtype, N, K, columns = A.dtype, int(C.shape[1]), int(A.shape[1]), int(C.shape[1]) // wide
    with T.Kernel(device=size, block=blocks, threads=256) as block:
        a = T.alloc((ALIGN, DEPTH), dtype, level="l1")
        b, up = (T.alloc((wide, DEPTH), dtype, level="l1") for _ in range(2))
        c, c_up = (T.alloc((ALIGN, wide), "float32", level="l0") for _ in range(2))
        out = T.alloc((ALIGN, wide), dtype, level="l1")
        for turn in T.serial(turns_of(block, blocks, columns * used[0])):
            tile, column = (block + turn * blocks) // columns, (block + turn * blocks) % columns
            T.clear(c)
            T.clear(c_up)
            for k in T.Pipelined(T.ceildiv(K, DEPTH), num_stages=GATED_STAGES):
                T.copy(A[tile * ALIGN, k * DEPTH], a)
                T.copy(B[owners[tile], column * wide, k * DEPTH], b)
                T.copy(B[owners[tile], N + column * wide, k * DEPTH], up)
                T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(a, up, c_up, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            if keeps:
                T.copy(c, out)
                T.copy(out, H[tile * ALIGN, column * wide])
                T.copy(c_up, out)
                T.copy(out, H[tile * ALIGN, N + column * wide])
            swiglu(c, c_up)
            T.copy(c, out)
            T.copy(out, C[tile * ALIGN, column * wide])


@T.macro
def gated_gradient_grid(D, B, owners, W, H, DH, C, DW, size):
    """The gradients of both products of `gated_grid`, and of rows' weights, from those of the sums of rows.

    With E = D B, and act = silu(gate) * up of H: DH from w E, C = w act, and DW[n] = the sum over columns of tile n of
    E * act.
    """
    dtype, K, N = D.dtype, int(D.shape[1]), int(C.shape[1])
    wide = columns_of(N)
    with T.Kernel(device=size, block=(N // wide, owners.shape[0]), threads=256) as (column, tile):
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
                s = sigmoid(g)
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


def layer_program(
    size: int,
    local: int,
    choices: int,
    features: int,
    inner: int,
    dtype: str,
    kind: str,
    narrow: bool,
    keeps: bool,
    blocks: int,
) -> Any:
    """The forward of a layer: tables, tokens to their experts, both GEMMs, and the weighted sums back.

    Arguments as those of its grids. `kind`: the type of choices. GEMMs have `narrow` tiles for few rows of each expert:
    their time is that of loading weights, which takes many blocks. `blocks`: of the persistent grids of the GEMMs.
    """
    numbers, chunks, most = T.dynamic("numbers"), T.dynamic("chunks"), T.dynamic("most")
    room, tiles = T.dynamic("room"), T.dynamic("tiles")
    unit = UNIT_BYTES // 2
    gated, wide = columns_of(inner), grouped_gemm.columns_of(features)
    if narrow:
        gated, wide = min(gated, COLUMNS // 2), COLUMNS

    @T.prim_func
    def moe_layer(
        X: T.Tensor((most, features), dtype),
        chosen: T.Tensor((numbers,), kind),
        shares: T.Tensor((numbers,), "float32"),
        gate_up: T.Tensor((local, 2 * inner, features), dtype),
        down: T.Tensor((local, features, inner), dtype),
        in_chosen: T.Tensor((size, chunks, whole(choices)), "int32"),
        in_shares: T.Tensor((size, chunks, whole(choices)), "float32"),
        in_rows: T.Tensor((size, most, features), dtype),
        in_sums: T.Tensor((size, most, features), dtype),
        counted: T.Tensor((size * chunks, local + 2), "int32"),
        W: T.Tensor((room,), "float32"),
        counts: T.Tensor((local,), "int32"),
        dropped: T.Tensor((local,), "int32"),
        owners: T.Tensor((tiles,), "int32"),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, choices), "int32"),
        before: T.Tensor((most + 1, size), "int32"),
        used: T.Tensor((1,), "int32"),
        rows: T.Tensor((room, features), dtype),
        hidden: T.Tensor((room, 2 * inner) if keeps else (1, 1), dtype),
        active: T.Tensor((room, inner), dtype),
        made: T.Tensor((room, features), dtype),
        Y: T.Tensor((most, features), dtype),
        groups: T.int32,
    ):
        tables = W, counts, dropped, owners, order, sent, received, places, before, used
        tables_grids(chosen, shares, in_chosen, in_shares, counted, tables, True)
        scatter_grid(X, order, sent, in_rows, received, places, rows, unit)
        gated_grid(rows, gate_up, owners, used, hidden, active, size, gated, keeps, blocks)
        grouped_gemm.product_grid(active, down, owners, used, made, size, wide, True, blocks)
        sum_grid(made, W, received, places, in_sums, before, Y, groups, unit, True)

    return moe_layer


def layer_gradient_program(
    size: int, local: int, choices: int, features: int, inner: int, dtype: str, blocks: int, learns: bool = True
) -> Any:
    """The gradients of `layer_program`, from that of its result; those of the experts if it `learns`."""
    chunks, most, room, tiles = (T.dynamic(name) for name in ("chunks", "most", "room", "tiles"))
    unit, columns = UNIT_BYTES // 2, columns_of(inner)

    @T.prim_func
    def moe_layer_gradient(
        DY: T.Tensor((most, features), dtype),
        gate_up: T.Tensor((local, 2 * inner, features), dtype),
        down: T.Tensor((local, features, inner), dtype),
        rows: T.Tensor((room, features), dtype),
        hidden: T.Tensor((room, 2 * inner), dtype),
        W: T.Tensor((room,), "float32"),
        counts: T.Tensor((local,), "int32"),
        owners: T.Tensor((tiles,), "int32"),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, choices), "int32"),
        before: T.Tensor((most + 1, size), "int32"),
        used: T.Tensor((1,), "int32"),
        in_shares: T.Tensor((size, chunks, whole(choices)), "float32"),
        in_rows: T.Tensor((size, most, features), dtype),
        in_sums: T.Tensor((size, most, features), dtype),
        far: T.Tensor((room, features), dtype),
        of_hidden: T.Tensor((room, 2 * inner), dtype),
        active: T.Tensor((room, inner), dtype),
        of_rows: T.Tensor((room, features), dtype),
        of_W: T.Tensor((inner // columns, room), "float32"),
        DX: T.Tensor((most, features), dtype),
        of_shares: T.Tensor((most, choices), "float32"),
        of_gate_up: T.Tensor((local, 2 * inner, features) if learns else (1, 1, 1), dtype),
        of_down: T.Tensor((local, features, inner) if learns else (1, 1, 1), dtype),
        groups: T.int32,
    ):
        scatter_grid(DY, order, sent, in_rows, received, places, far, unit)
        gated_gradient_grid(far, down, owners, W, hidden, of_hidden, active, of_W, size)
        returns_grid(of_W, received, places, before, in_shares, of_shares)
        wide = grouped_gemm.columns_of(features)
        grouped_gemm.product_grid(of_hidden, gate_up, owners, used, of_rows, size, wide, False, blocks)
        sum_grid(of_rows, W, received, places, in_sums, before, DX, groups, unit, False)
        if learns:
            grouped_gemm.outer_grid(far, active, counts, of_down, size)
            grouped_gemm.outer_grid(of_hidden, rows, counts, of_gate_up, size)

    return moe_layer_gradient
