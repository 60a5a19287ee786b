# SPDX-License-Identifier: MIT
"""Workarounds for faults of stock TileLang that change a function before any of its passes.

Before: a function as traced, which is the key of TileLang's cache of kernels. After: one that TileLang lowers right.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from tvm import tirx

from tilelang_core.complements import with_complements
from tilelang_core.launches import binds_threads
from tilelang_core.loaded_layouts import with_loaded_layouts
from tilelang_core.loads_by_registers import with_serial_loops
from tilelang_core.loop_extents import with_constant_extents
from tilelang_core.rewrite import renamed
from tilelang_core.single_trip_loops import with_kept_extents
from tilelang_core.uneven_copies import with_like_extents

__all__ = ["mended", "mending"]


def mended(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with workarounds, and with fresh thread indices.

    Lowering renames these in place, to "thread_binding", in GEMMs of mma: a program has the same text after it.
    """
    own = with_loaded_layouts(func)
    own = own.with_body(renamed(own.body, binds_threads))
    own = with_serial_loops(with_constant_extents(own))
    return with_like_extents(with_kept_extents(with_complements(own)))


@contextlib.contextmanager
def mending() -> Iterator[None]:
    """Within the block, stock TileLang lowers `mended` functions; it looks them up in its cache as they were traced."""
    engine: Any = importlib.import_module("tilelang.engine.lower")
    stock = engine.lower_with_context
    engine.lower_with_context = lambda func, *given, **options: stock(mended(func), *given, **options)
    try:
        yield
    finally:
        engine.lower_with_context = stock
