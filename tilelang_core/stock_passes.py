# SPDX-License-Identifier: MIT
"""Rewrites of functions before or after one of stock TileLang's passes, and lowerings that end after one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import tilelang.transform
import tvm
from tvm import tirx
from tvm.ir.transform import Sequential
from tvm.tirx.transform import prim_func_pass

Apply: TypeAlias = Callable[[tirx.PrimFunc], tirx.PrimFunc]


@contextlib.contextmanager
def rewriting(name: str, rewrite: Callable[[tirx.PrimFunc], tirx.PrimFunc], *, after: bool = False) -> Iterator[None]:
    """Within the block, stock's pass of this name gets functions rewritten, or what it made is, if `after`."""
    own = prim_func_pass(lambda func, module, context: rewrite(func), opt_level=0, name=f"{name}'s rewrite")
    with _replaced(name, lambda stock: Sequential([stock, own] if after else [own, stock])):
        yield


@contextlib.contextmanager
def around(name: str, run: Callable[[tirx.PrimFunc, Apply], tirx.PrimFunc]) -> Iterator[None]:
    """Within the block, stock's pass of this name is `run`, which gets a function, and what applies the pass to one."""

    def made(stock: Any) -> Any:
        def apply(func: tirx.PrimFunc) -> tirx.PrimFunc:
            return stock(tvm.IRModule({"main": func}))["main"]

        return prim_func_pass(lambda func, module, context: run(func, apply), opt_level=0, name=f"around {name}")

    with _replaced(name, made):
        yield


@contextlib.contextmanager
def _replaced(name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block, stock's pass of this name is what `made` returns for it."""
    stock = getattr(tilelang.transform, name)
    setattr(tilelang.transform, name, lambda *args, **options: made(stock(*args, **options)))
    try:
        yield
    finally:
        setattr(tilelang.transform, name, stock)


@contextlib.contextmanager
def ended_after(name: str) -> Iterator[Any]:
    """Context of a lowering that ends after stock's pass of this name.

    Gives the instrument for the lowering, whose `module` is what the pass made; None where it is not reached.
    """
    end = _End(name)
    try:
        yield end
    except Exception:
        if end.module is None:
            raise


@tvm.instrument.pass_instrument
class _End:
    def __init__(self, name: str) -> None:
        self._name, self.module = name, None

    def run_after_pass(self, module: Any, info: Any) -> None:
        if str(info.name).endswith(self._name):
            self.module = module
            raise RuntimeError("the other passes are not needed")
