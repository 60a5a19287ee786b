# SPDX-License-Identifier: MIT
"""Grids of a layer of experts as programs by themselves; `works` has those that benchmarks measure."""

import importlib.util
from pathlib import Path
from typing import Any

import tilescale.language as T
from tilescale.ops.expert_float8 import scatter_float8_grid
from tilescale.ops.expert_programs import columns_of, gated_gradient_grid
from tilescale.ops.float8_wire import GROUP, WIRE
from tilescale.ops.moe_tables import ALIGN

_SPEC = importlib.util.spec_from_file_location("works", Path(__file__).parents[2] / "benchmarks/works/expert_grids.py")
works = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(works)


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


def scatter_float8_program(size: int, features: int, copies: int) -> Any:
    """`scatter_float8_grid` of rows of bfloat16."""
    given, most, room, groups = T.dynamic("given"), T.dynamic("most"), T.dynamic("room"), T.dynamic("groups")

    @T.prim_func
    def scatter_float8(
        X: T.Tensor((given, features), "bfloat16"),
        order: T.Tensor((size, most), "int32"),
        sent: T.Tensor((size,), "int32"),
        inbox: T.Tensor((size, groups, GROUP), WIRE),  # by source
        in_scales: T.Tensor((size, groups), "float32"),
        received: T.Tensor((size,), "int32"),
        places: T.Tensor((size, most, copies), "int32"),
        R: T.Tensor((room, features), WIRE),
        of_R: T.Tensor((features // GROUP, room), "float32"),
    ):
        scatter_float8_grid(X, in_scales, order, sent, inbox, in_scales, received, places, R, of_R, R, False)

    return scatter_float8
