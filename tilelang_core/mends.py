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
from tilelang_core.unaligned_copies import with_copies_by_threads, with_stores_by_threads
from tilelang_core.uneven_copies import with_like_extents

__all__ = ["mended", "mending"]

_GAPPED = "plain SMEM layout is not a bijection"
"""TileLang's error about a part of a tile that a bulk store cannot take, since it is in several pieces of the tile's
layout. Only its layout inference knows which."""


def mended(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with workarounds, and with fresh thread indices.

    Lowering renames these in place, to "thread_binding", in GEMMs of mma: a program has the same text after it.
    """
    own = with_loaded_layouts(func)
    own = own.with_body(renamed(own.body, binds_threads))
    own = with_serial_loops(with_constant_extents(own))
    own = with_like_extents(with_kept_extents(with_complements(own)))
    return with_copies_by_threads(own)


@contextlib.contextmanager
def mending() -> Iterator[None]:
    """Within the block, stock TileLang lowers `mended` functions; it looks them up in its cache as they were traced."""
    engine: Any = importlib.import_module("tilelang.engine.lower")
    stock = engine.lower_with_context

    def lower_with_context(func: tirx.PrimFunc, *given: Any, **options: Any) -> Any:
        own = mended(func)
        try:
            return stock(own, *given, **options)
        except Exception as error:
            by_threads = with_stores_by_threads(own) if _GAPPED in str(error) else own
            if by_threads.same_as(own):
                raise
        return stock(by_threads, *given, **options)

    engine.lower_with_context = lower_with_context
    try:
        yield
    finally:
        engine.lower_with_context = stock
