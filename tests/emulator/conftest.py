# SPDX-License-Identifier: MIT
"""What is emulated here is lowered to CUDA too, with --lower."""

from tests.again import lowered

__all__ = ["lowered"]
