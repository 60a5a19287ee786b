# SPDX-License-Identifier: MIT
"""With --lower, the programs emulated here are lowered to CUDA too."""

from tests.again import lowered

__all__ = ["lowered"]
