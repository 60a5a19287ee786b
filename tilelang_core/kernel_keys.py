# SPDX-License-Identifier: MIT
"""Keys of kernels in TileLang's cache on disk, made once for a function.

Why: a key is a digest of the function's script. Printing that script takes most of the time in which a kernel of the
cache is looked up, and most of the time in which the kernel is loaded. A digest that is kept with a function replaces
its script.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator
from typing import Any

from tilelang.cache.kernel_cache import KernelCache
from tvm import tirx

from tilelang_core.lru import LruCache
from tilelang_core.source_rewrites import KEY

_PARAMETERS = inspect.signature(KernelCache._generate_key)

_keys: LruCache[Hashable, str] = LruCache(1024)
"""By function and options. Functions are immutable, and compared by identity."""

_scripts: LruCache[tirx.PrimFunc, str] = LruCache(1024)
"""Texts that stand for the scripts of functions in keys."""


class _Script:
    def __init__(self, text: str):
        self._text = text

    def script(self, **_: Any) -> str:
        """The text, as a function gives its script."""
        return self._text


def stands_for(digest: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function of `keyed`, in whose key a digest of the script that it had before stands for its own script.

    Each process that looks for the kernel must know the digest.
    """
    _scripts[func] = f"{digest} {func.attrs.get(KEY, '')}"
    return func


@contextlib.contextmanager
def keys_made_once() -> Iterator[None]:
    """Within the block TileLang's cache prints no function twice."""
    stock = KernelCache._generate_key

    def key(cache: KernelCache, *given: Any, **options: Any) -> str:
        named = _PARAMETERS.bind(cache, *given, **options).arguments
        del named["self"]
        func = named.pop("func")
        text = _scripts.get(func)
        known = type(cache), func, text, repr(sorted(named.items()))
        return _keys.made(known, lambda: stock(cache, func if text is None else _Script(text), **named))

    KernelCache._generate_key = key
    try:
        yield
    finally:
        KernelCache._generate_key = stock
