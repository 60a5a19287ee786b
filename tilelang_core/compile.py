# SPDX-License-Identifier: MIT
"""The stock compiler: CUDA text of a traced function, a compiled kernel, and `jit` with a last step of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tilelang
import tvm
from tilelang.jit import JITImpl
from tilelang.backend.target import determine_target
from tvm import tirx

__all__ = ["JIT", "compile_kernel", "cuda_source", "jit"]


def cuda_source(func: tirx.PrimFunc, target: Any, pass_configs: dict[str, Any] | None = None) -> str:
    """The CUDA text that stock TileLang generates for `func`; needs no GPU and no nvcc."""
    target = determine_target(target, return_object=True)
    own = func.attrs["tilelang_pass_configs"] if func.attrs and "tilelang_pass_configs" in func.attrs else {}
    with tvm.transform.PassContext(opt_level=3, config={**dict(own), **(pass_configs or {})}), target:
        return tilelang.lower(func, target=target).kernel_source


def compile_kernel(func: tirx.PrimFunc, **options: Any) -> Any:
    """`tilelang.compile`: a kernel for the GPU at hand."""
    return tilelang.compile(func, **options)


class JIT(JITImpl):
    """TileLang's just-in-time factory with two hooks.

    `tracing()` is entered around everything that may trace; `finish(func, options)` makes the kernel of a traced
    function.
    """

    tracing: Callable[[], contextlib.AbstractContextManager]
    finish: Callable[[tirx.PrimFunc, dict[str, Any]], Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.tracing():
            return super().__call__(*args, **kwargs)

    def get_tir(self, *args: Any, **kwargs: Any) -> tirx.PrimFunc:
        with self.tracing():
            return super().get_tir(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        options = {
            "out_idx": self.out_idx,
            "execution_backend": self.execution_backend,
            "target": self.target,
            "target_host": self.target_host,
            "verbose": self.verbose,
            "pass_configs": self.pass_configs,
            "compile_flags": self.compile_flags,
        }
        return self.finish(self.get_tir(*args, **kwargs), options)


def jit(function: Callable, *, tracing: Callable, finish: Callable, **options: Any) -> JIT:
    """`tilelang.jit(function, **options)` with the two hooks of `JIT`."""
    stock = tilelang.jit(**options)(function)
    result = JIT(**{name: getattr(stock, name) for name in stock.__dataclass_fields__})
    result.tracing, result.finish = tracing, finish
    return result
