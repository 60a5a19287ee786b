# SPDX-License-Identifier: MIT
"""Programs of a layer of SwiGLU experts: the whole layer, and its grouped GEMMs with the activation in their epilogues.

Rows are in the order of `moe_dispatch`, each tile has those of one expert. An expert's `gate_up` has the rows of its
gate, then those that the gate multiplies.
"""

import math
from dataclasses import dataclass
from typing import Any

import tilescale.language as T
from tilescale.ops import grouped_gemm
from tilescale.ops.expert_float8 import scatter_float8_grid, sum_float8_grid
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.gemm_tiles import DEPTH, sigmoid, swiglu
from tilescale.ops.grouped_float8 import scaled_gated_grid, scaled_grid
from tilescale.ops.grouped_gemm import STAGES
from tilescale.ops.moe_tables import ALIGN, returns_grid, tables_grids, whole
from tilescale.ops.persistent import iterations_of
from tilescale.ops.row_exchange import UNIT_BYTES, scatter_grid, sum_grid
from tilescale.program.wire import WIRE

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
    """C[m] = silu(A[m] gate^T) * (A[m] up^T) of the owner of m, of the `used` tiles; H has both results if it `keeps`
    them.

    A persistent grid: a block loads its next tile while it stores this one.
    """
    dtype, N, K, columns = A.dtype, int(C.shape[1]), int(A.shape[1]), int(C.shape[1]) // wide
    with T.Kernel(device=size, block=blocks, threads=256) as block:
        a = T.alloc((ALIGN, DEPTH), dtype, level="l1")
        b, up = (T.alloc((wide, DEPTH), dtype, level="l1") for _ in range(2))
        c, c_up = (T.alloc((ALIGN, wide), "float32", level="l0") for _ in range(2))
        out = T.alloc((ALIGN, wide), dtype, level="l1")
        for iteration in T.serial(iterations_of(block, blocks, columns * used[0])):
            tile, column = (block + iteration * blocks) // columns, (block + iteration * blocks) % columns
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
    """The gradients of both GEMMs of `gated_grid`, and of rows' weights, from those of the sums of rows.

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


@dataclass(frozen=True)
class LayerForm:
    """Form of a layer of experts.

    Attributes:
        dtype: of results, of tokens that are not `quantized`, and of experts without scales.
        by_rows: whether each row of float8 weights has a scale, else each square of 128 x 128; None for experts of
            `dtype`.
        keeps: whether the rows of `dtype` and the results of the first GEMM are kept, for a backward.
        quantized: whether tokens are float8 with scales of groups.
        narrow_sums: whether sums travel as float8.
        narrow: whether GEMMs of `dtype` have narrow tiles, for few rows of each expert: their time is that of loading
            weights, which takes many blocks.
    """

    dtype: str
    by_rows: bool | None = None
    keeps: bool = False
    quantized: bool = False
    narrow_sums: bool = False
    narrow: bool = False

    @property
    def is_float8(self) -> bool:
        """Whether experts are float8."""
        return self.by_rows is not None

    @property
    def weights(self) -> str:
        """Type of weights, and of the rows that are multiplied by them."""
        return WIRE if self.is_float8 else self.dtype

    def scales(self, local: int, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the scales of the weights of `local` experts."""
        if self.by_rows:
            return local, rows
        return (local, rows // GROUP, columns // GROUP) if self.is_float8 else (1, 1, 1)

    def shape(self, *shape: Any) -> tuple[Any, ...]:
        """The shape of scales of rows."""
        return shape if self.is_float8 else (1, 1)


def layer_program(
    size: int, local: int, choices: int, features: int, inner: int, kind: str, form: LayerForm, blocks: int
) -> Any:
    """The forward of a layer: tables, tokens to their experts, both GEMMs, and the weighted sums back.

    Arguments as those of its grids. `kind`: the type of choices. `blocks`: of the persistent grids of GEMMs without
    scales.
    """
    numbers, chunks, most = T.dynamic("numbers"), T.dynamic("chunks"), T.dynamic("most")
    room, tiles, groups = T.dynamic("room"), T.dynamic("tiles"), T.dynamic("groups")
    dtype, unit = form.dtype, UNIT_BYTES // 2
    gated, columns = columns_of(inner), grouped_gemm.columns_of(features)
    if form.narrow:
        gated, columns = min(gated, COLUMNS // 2), COLUMNS
    whole_rows, in_groups = (size, most, features), (size, groups, GROUP)

    @T.prim_func
    def moe_layer(
        X: T.Tensor((most, features), WIRE if form.quantized else dtype),
        of_X: T.Tensor((groups,) if form.quantized else (1,), "float32"),
        chosen: T.Tensor((numbers,), kind),
        shares: T.Tensor((numbers,), "float32"),
        gate_up: T.Tensor((local, 2 * inner, features), form.weights),
        of_gate_up: T.Tensor(form.scales(local, 2 * inner, features), "float32"),
        down: T.Tensor((local, features, inner), form.weights),
        of_down: T.Tensor(form.scales(local, features, inner), "float32"),
        in_chosen: T.Tensor((size, chunks, whole(choices)), "int32"),
        in_shares: T.Tensor((size, chunks, whole(choices)), "float32"),
        in_rows: T.Tensor(in_groups if form.is_float8 else whole_rows, form.weights),
        in_scales: T.Tensor(form.shape(size, groups), "float32"),
        in_sums: T.Tensor(in_groups if form.narrow_sums else whole_rows, WIRE if form.narrow_sums else dtype),
        in_sum_scales: T.Tensor((size, groups) if form.narrow_sums else (1, 1), "float32"),
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
        wide: T.Tensor((room, features) if form.keeps or not form.is_float8 else (1, 1), dtype),
        hidden: T.Tensor((room, 2 * inner) if form.keeps else (1, 1), dtype),
        rows: T.Tensor(form.shape(room, features), form.weights),
        of_rows: T.Tensor(form.shape(features // GROUP, room), "float32"),
        active: T.Tensor((room, inner), form.weights),
        of_active: T.Tensor(form.shape(inner // GROUP, room), "float32"),
        made: T.Tensor((room, features), dtype),
        Y: T.Tensor((most, features), dtype),
        sharers: T.int32,
    ):
        tables = W, counts, dropped, owners, order, sent, received, places, before, used
        tables_grids(chosen, shares, in_chosen, in_shares, counted, tables, True)
        if form.is_float8:
            scatter_float8_grid(
                *(X, of_X, order, sent, in_rows, in_scales, received, places, rows, of_rows, wide, form.keeps)
            )
            scaled_gated_grid(rows, of_rows, gate_up, of_gate_up, owners, hidden, active, of_active, size, form.keeps)
            scaled_grid(active, of_active, down, of_down, owners, made, size)
        else:
            scatter_grid(X, order, sent, in_rows, received, places, wide, unit)
            gated_grid(wide, gate_up, owners, used, hidden, active, size, gated, form.keeps, blocks)
            grouped_gemm.gemm_grid(active, down, owners, used, made, size, columns, True, blocks)
        if form.narrow_sums:
            sum_float8_grid(made, W, received, places, in_sums, in_sum_scales, before, Y)
        else:
            sum_grid(made, W, received, places, in_sums, before, Y, sharers, unit, True)

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
        grouped_gemm.gemm_grid(of_hidden, gate_up, owners, used, of_rows, size, wide, False, blocks)
        sum_grid(of_rows, W, received, places, in_sums, before, DX, groups, unit, False)
        if learns:
            grouped_gemm.outer_grid(far, active, counts, of_down, size)
            grouped_gemm.outer_grid(of_hidden, rows, counts, of_gate_up, size)

    return moe_layer_gradient
