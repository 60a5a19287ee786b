# SPDX-License-Identifier: MIT
"""Z3 for the queries of TVM's analyzer: thousands of small ones, each to a new solver, and hundreds of contexts.

By default Z3 looks for cuts by Hermite normal forms, which suits larger problems: here these took up to a third of the
lowering of a GEMM with an epilogue. Other cuts decide the same queries.

Each context allocates blocks above the size from which malloc maps memory. Mapping and clearing it anew for each
context took half of the lowering.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache

import z3

_CUTS = "smt.arith.enable_hnf"

_LARGEST_BLOCK = (32 << 20) - (64 << 10)
"""Bytes. glibc raises its thresholds to the size of a mapped block that is freed, up to 32 MiB: mallopt(3)."""


@contextlib.contextmanager
def proving() -> Iterator[None]:
    """Within the block Z3 reuses memory, and makes no cuts by Hermite normal forms."""
    _reuse_freed_blocks()
    before = z3.get_param(_CUTS)
    z3.set_param(_CUTS, False)
    try:
        yield
    finally:
        z3.set_param(_CUTS, before)


@cache
def _reuse_freed_blocks() -> None:
    """Let malloc reuse blocks below 32 MiB, as in any process that has freed one of this size."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(libc.malloc(_LARGEST_BLOCK))
