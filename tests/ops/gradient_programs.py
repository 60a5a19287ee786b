# SPDX-License-Identifier: MIT
"""Grids of the gradients of a layer of experts as programs by themselves."""

from typing import Any

import tilescale.language as T
from tilescale.ops.expert_programs import columns_of, gated_gradient_grid
from tilescale.ops.moe_tables import ALIGN


def gradient_program(size: int, N: int, K: int, dtype: str) -> Any:
    """`gated_gradient_grid` of N columns."""
    room, experts = T.dynamic("room"), T.dynamic("experts")

    @T.prim_func
    def gated_experts_gradient(
        D: T.Tensor((room, K), dtype),
        B: T.Tensor((experts, K, N), dtype),
        owners: T.Tensor((room // ALIGN,), "int32"),
        W: T.Tensor((room,), "float32"),
        H: T.Tensor((room, 2 * N), dtype),
        DH: T.Tensor((room, 2 * N), dtype),
        C: T.Tensor((room, N), dtype),
        DW: T.Tensor((N // columns_of(N), room), "float32"),
    ):
        gated_gradient_grid(D, B, owners, W, H, DH, C, DW, size)

    return gated_experts_gradient
