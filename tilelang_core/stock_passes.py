# SPDX-License-Identifier: MIT
"""Rewrites of functions before or after one of stock TileLang's passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tilelang.transform
from tvm import tirx
from tvm.ir.transform import Sequential
from tvm.tirx.transform import prim_func_pass


@contextlib.contextmanager
def rewriting(
    name: str, rewrite: Callable[[tirx.PrimFunc], tirx.PrimFunc], *, after: bool = False
) -> Iterator[None]:
    """Within the block, stock's pass of this name gets functions rewritten, or what it made is, if `after`."""
    stock = getattr(tilelang.transform, name)
    own = prim_func_pass(lambda func, module, context: rewrite(func), opt_level=0, name=f"tilelang_core.{name}")

    def passes(**options: Any) -> Sequential:
        return Sequential([stock(**options), own] if after else [own, stock(**options)])

    setattr(tilelang.transform, name, passes)
    try:
        yield
    finally:
        setattr(tilelang.transform, name, stock)
