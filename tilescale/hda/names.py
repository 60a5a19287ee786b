# SPDX-License-Identifier: MIT
"""The built-in machines by name, for editors to complete; `Machine.names` finds the files themselves."""

from __future__ import annotations

from typing import Literal, TypeAlias

BuiltIn: TypeAlias = Literal[
    "a100-sxm-8", "b200-sxm-8", "cpu-node", "gb200-nvl72", "h100-sxm-8", "h200-sxm-8", "h200-sxm-8x4", "mi300x-8",
    "rtx4090-pcie-2", "stacked-3d", "wafer-mesh",
]  # fmt: skip
