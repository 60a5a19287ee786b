# SPDX-License-Identifier: MIT
"""GEMMs of the two float8 types on Hopper's tensor cores: e5m2 times e4m3, as gradients are multiplied with weights.

The instruction supports mixed types, and TileLang has its templates, but stock TileLang 0.1.15 accepts them only in its
class for Blackwell. Before: such a `T.gemm` is refused while layouts are inferred. After: it is lowered.
"""

from __future__ import annotations

from tilelang.cuda.op.gemm.gemm_wgmma import GemmWGMMA


def install() -> None:
    """Let warpgroup GEMMs have operands of both types."""
    GemmWGMMA.allow_f8f6f4_mixed_dtypes = property(lambda self: True)
