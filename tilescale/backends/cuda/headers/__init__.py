# SPDX-License-Identifier: MIT
"""Device functions in CUDA C++ with PTX, which those of `tilescale/backends/tilelang/headers` call.

memory.cuh: accesses, fences and the clock; adders.cuh: atomic additions.
"""

from __future__ import annotations

from tilescale.backends.tilelang import headers


def header(name: str) -> str:
    """The text of a file for CUDA."""
    return headers.header(name, __name__)
