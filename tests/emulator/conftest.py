# SPDX-License-Identifier: MIT
"""What is emulated here is lowered to CUDA too."""

from tests.again import lowered

__all__ = ["lowered"]
