# SPDX-License-Identifier: MIT
"""Products of the two float8 types on Hopper's tensor cores: e5m2 times e4m3, as gradients are multiplied with weights.

The instruction takes both types side by side, and TileLang has its templates, but stock TileLang 0.1.15 lets only its
class for Blackwell say so. Before: such a `T.gemm` is refused while layouts are inferred. After: it is lowered.
"""

from __future__ import annotations

from tilelang.cuda.op.gemm.gemm_wgmma import GemmWGMMA

__all__ = ["install"]


def install() -> None:
    """Let warpgroup products have operands of both types."""
    GemmWGMMA.allow_f8f6f4_mixed_dtypes = property(lambda self: True)
