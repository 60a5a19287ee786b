# SPDX-License-Identifier: MIT
"""Grouped GEMMs of layers of experts as programs by themselves."""

from typing import Any

import tilescale.language as T
from tilescale.ops.expert_programs import columns_of, gated_grid
from tilescale.ops.few_rows_gemm import few_gated_grid, few_grid
from tilescale.ops.float8_wire import GROUP, WIRE
from tilescale.ops.grouped_float8 import scaled_gated_grid
from tilescale.ops.moe_tables import ALIGN


def gated_program(size: int, N: int, K: int, dtype: str, keeps: bool, blocks: int) -> Any:
    """`gated_grid` of N columns."""
    room, experts = T.dynamic("room"), T.dynamic("experts")

    @T.prim_func
    def gated_experts(
        A: T.Tensor((room, K), dtype),
        B: T.Tensor((experts, 2 * N, K), dtype),
        owners: T.Tensor((room // ALIGN,), "int32"),
        used: T.Tensor((1,), "int32"),
        H: T.Tensor((room, 2 * N) if keeps else (1, 1), dtype),
        C: T.Tensor((room, N), dtype),
    ):
        gated_grid(A, B, owners, used, H, C, size, columns_of(N), keeps, blocks)

    return gated_experts


def scaled_gated_program(size: int, N: int, K: int, keeps: bool = False) -> Any:
    """`scaled_gated_grid` of N columns."""
    room, experts = T.dynamic("room"), T.dynamic("experts")

    @T.prim_func
    def gated_experts_scaled(
        A: T.Tensor((room, K), WIRE),
        of_A: T.Tensor((K // GROUP, room), "float32"),
        B: T.Tensor((experts, 2 * N, K), WIRE),
        of_B: T.Tensor((experts, 2 * N // GROUP, K // GROUP), "float32"),
        owners: T.Tensor((room // ALIGN,), "int32"),
        H: T.Tensor((room, 2 * N) if keeps else (1, 1), "bfloat16"),
        C: T.Tensor((room, N), WIRE),
        of_C: T.Tensor((N // GROUP, room), "float32"),
    ):
        scaled_gated_grid(A, of_A, B, of_B, owners, H, C, of_C, size, keeps)

    return gated_experts_scaled


def few_float8_program(experts: int, features: int, inner: int, blocks: int) -> Any:
    """Both GEMMs of float8 experts alone."""
    room, tiles = T.dynamic("room"), T.dynamic("tiles")

    @T.prim_func
    def few_float8_experts(
        A: T.Tensor((room, features), WIRE),
        of_A: T.Tensor((features // GROUP, room), "float32"),
        gate_up: T.Tensor((experts, 2 * inner, features), WIRE),
        of_gate_up: T.Tensor((experts, 2 * inner // GROUP, features // GROUP), "float32"),
        down: T.Tensor((experts, features, inner), WIRE),
        of_down: T.Tensor((experts, features // GROUP, inner // GROUP), "float32"),
        owners: T.Tensor((tiles,), "int32"),
        active: T.Tensor((room, inner), WIRE),
        of_active: T.Tensor((inner // GROUP, room), "float32"),
        C: T.Tensor((room, features), "bfloat16"),
    ):
        few_gated_grid(A, of_A, gate_up, of_gate_up, owners, active, of_active, 0, blocks)
        few_grid(active, of_active, down, of_down, owners, C, 0, blocks)

    return few_float8_experts