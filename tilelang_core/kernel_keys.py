# SPDX-License-Identifier: MIT
"""Keys of kernels in TileLang's cache on disk, made once for a function.

Why: a key is a digest of the function's script. Printing that script takes most of the time in which a kernel of the
cache is looked up, and most of the time in which the kernel is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

from tilelang.cache.kernel_cache import KernelCache

from tilelang_core.lru import LruCache

_keys: LruCache[Hashable, str] = LruCache(1024)
"""By function and options. Functions are immutable, and compared by identity."""


@contextlib.contextmanager
def keys_made_once() -> Iterator[None]:
    """Within the block TileLang's cache prints no function twice."""
    stock = KernelCache._generate_key

    def key(cache: KernelCache, func: Any, *given: Any, **options: Any) -> str:
        known = type(cache), func, repr((given, sorted(options.items())))
        return _keys.made(known, lambda: stock(cache, func, *given, **options))

    KernelCache._generate_key = key
    try:
        yield
    finally:
        KernelCache._generate_key = stock
