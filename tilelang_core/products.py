# SPDX-License-Identifier: MIT
"""Distribution of `T.gemm`'s result over warps in stock TileLang, available before anything is lowered."""

from __future__ import annotations

from typing import Any

import tvm
from tilelang.backend.target import determine_target

from tilelang_core import ir
from tilelang_core.tiles import Gemm

WARP = 32
_BY_WARPS = "cuda.mma"


def refusal(product: Gemm, threads: int, target: Any) -> str | None:
    """Why `threads` threads cannot compute a GEMM; None if they can, or if its sizes are known at launch only."""
    rows, columns = (ir.constant(size) for size in product.sizes[:2])
    policy = ir.constant(product.policy)
    if rows is None or columns is None or policy is None:
        return None
    if threads % WARP:
        return f"{threads} threads are not a whole number of warps"
    kind = tvm.ir.make_node("tl.GemmWarpPolicy", policy_type=policy, m_warp=0, n_warp=0)
    try:
        kind.compute_warp_partition(rows, columns, threads, determine_target(target, return_object=True), _BY_WARPS)
    except tvm.error.InternalError:
        return f"warps cannot share it out, {threads // WARP} here: each takes a multiple of 16 rows and of 8 columns"
    return None
