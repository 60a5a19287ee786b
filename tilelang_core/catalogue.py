# SPDX-License-Identifier: MIT
"""Which operations TileLang has for CUDA programs."""

from __future__ import annotations

from functools import cache

from tilelang_core import tl
from tilelang_core.ir import Op

_PREFIXES = ("tl.", "tirx.ptx_", "tirx.mma_", "tirx.tvm_warp_", "tirx.tvm_thread_", "tirx.tvm_storage_")
_OF_OTHERS = ("tl.ascend_", "tl.tileop.ascend_", "tl.simd.", "tl.ds_read_", "tl.cooperative_tensor_", "tl.tvm_")
"""Other architectures, and what only host code does."""

_SYNTAX = {tl.REGION, tl.DECLARED_PTR, tl.LOOP_BREAK, "tirx.tvm_thread_invariant"}


@cache
def cuda_operations() -> tuple[str, ...]:
    """The names of operations that CUDA programs may contain, sorted, but for those that only stand in arguments."""
    return tuple(
        sorted(
            name
            for name in map(str, Op.list_op_names())
            if name.startswith(_PREFIXES) and not name.startswith(_OF_OTHERS) and name not in _SYNTAX
        )
    )
