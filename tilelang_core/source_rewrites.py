# SPDX-License-Identifier: MIT
"""Rewrites of the CUDA text that TileLang generates, and their part in the key of TileLang's cache.

Why: TileLang keeps compiled kernels on disk under its input: the function and the options. Rewrites and checks of the
text are not in that key, so the output of an older rewrite would be loaded for a newer one. Before: a function. After:
the same one with an attribute, a digest of the sources of its rewrites and checks. A rewrite whose module changes is
another one; its callees have to be in that module, or in this package.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from tvm import tirx

from tilelang_core.lru import LruCache

Rewrite = Callable[[str], str]
"""A function of a module from the text of a kernel to that which nvcc gets."""

KEY = "tilescale.text"
"""Attribute of a function that identifies the rewrites and checks of its text."""

_keyed: LruCache[tuple[tirx.PrimFunc, str], tirx.PrimFunc] = LruCache(1024)
"""By the identity of functions, as other caches have the functions that are made here among their keys."""


def through(rewrites: Sequence[Rewrite], text: str) -> str:
    """Apply the rewrites to the text, in order."""
    return reduce(lambda so_far, rewrite: rewrite(so_far), rewrites, text)


def keyed(func: tirx.PrimFunc, rewrites: Sequence[Callable], check: Any = None) -> tirx.PrimFunc:
    """The function, with an attribute that identifies the rewrites and checks of its text; always the same one."""
    if check is None and not rewrites:
        return func
    text = _digest(tuple(rewrites)) if check is None else f"{_digest((*rewrites, type(check)))} {check!r}"
    return _keyed.made((func, text), lambda: func.with_attr(KEY, text))


@cache
def _digest(makers: tuple[Callable, ...]) -> str:
    names = [f"{maker.__module__}.{maker.__qualname__}" for maker in makers]
    sources = [inspect.getsource(inspect.getmodule(maker) or maker) for maker in makers]
    return hashlib.sha256("\0".join([*names, *sources, *_package()]).encode()).hexdigest()


@cache
def _package() -> list[str]:
    """The sources of this package, any of which may change a text."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
