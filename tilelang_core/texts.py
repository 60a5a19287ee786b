# SPDX-License-Identifier: MIT
"""Rewrites of the CUDA text that TileLang generates, and what tells its cache of them.

Why: TileLang keeps compiled kernels on disk under what it got: the function and the options. Of rewrites of the text it
knows nothing, so what an older rewrite made would be loaded for a newer one. Before: a function. After: the same one
with an attribute, a digest of the source of whatever rewrites its text. A rewrite whose module changes is another one;
what it calls has to lie in that module.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import cache, reduce

from tvm import tirx

__all__ = ["Rewrite", "keyed", "through"]

Rewrite = Callable[[str], str]
"""From the text of a kernel to that which nvcc gets: a function of a module."""

_KEY = "tilescale.text"


def through(rewrites: Sequence[Rewrite], text: str) -> str:
    """The text after all rewrites, in order."""
    return reduce(lambda so_far, rewrite: rewrite(so_far), rewrites, text)


def keyed(func: tirx.PrimFunc, rewrites: Sequence[Rewrite]) -> tirx.PrimFunc:
    """The function, with an attribute that tells who rewrites its text; itself if nobody does."""
    return func.with_attr(_KEY, _digest(tuple(rewrites))) if rewrites else func


@cache
def _digest(rewrites: tuple[Rewrite, ...]) -> str:
    names = [f"{rewrite.__module__}.{rewrite.__qualname__}" for rewrite in rewrites]
    sources = [inspect.getsource(inspect.getmodule(rewrite) or rewrite) for rewrite in rewrites]
    return hashlib.sha256("\0".join([*names, *sources]).encode()).hexdigest()
