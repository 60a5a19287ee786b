# SPDX-License-Identifier: MIT
"""Keys of kernels in TileLang's cache on disk, made once for a function.

Why: a key is a digest of the function's script. Printing that script takes most of the time in which a kernel of the
cache is looked up, and most of the time in which the kernel is loaded.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator
from typing import Any

from tilelang.cache.kernel_cache import KernelCache

from tilelang_core.lru import LruCache

_PARAMETERS = inspect.signature(KernelCache._generate_key)

_keys: LruCache[Hashable, str] = LruCache(1024)
"""By function and options. Functions are immutable, and compared by identity."""


@contextlib.contextmanager
def keys_made_once() -> Iterator[None]:
    """Within the block TileLang's cache prints no function twice."""
    stock = KernelCache._generate_key

    def key(cache: KernelCache, *given: Any, **options: Any) -> str:
        named = _PARAMETERS.bind(cache, *given, **options).arguments
        del named["self"]
        known = type(cache), named["func"], repr(sorted((name, x) for name, x in named.items() if name != "func"))
        return _keys.made(known, lambda: stock(cache, **named))

    KernelCache._generate_key = key
    try:
        yield
    finally:
        KernelCache._generate_key = stock
