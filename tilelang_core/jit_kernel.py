# SPDX-License-Identifier: MIT
"""TileLang's compiled kernel and its profiler, to extend, and compilation targets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tilelang.backend.target import determine_target
from tilelang.engine.param import KernelParam
from tilelang.jit.kernel import JITKernel
from tilelang.profiler import Profiler
from tilelang.utils.tensor import TensorSupplyType, torch_assert_close

__all__ = [
    "JITKernel", "KernelParam", "Profiler", "TensorSupplyType", "assert_close", "parameter", "target", "wrong_target",
]  # fmt: skip

assert_close = torch_assert_close


def parameter(dtype: Any, shape: Iterable[Any]) -> KernelParam:
    """A parameter as TileLang's tools know it; a scalar has no shape."""
    return KernelParam(dtype, [int(n) if hasattr(n, "value") else n for n in shape])


def wrong_target(given: Any) -> str | None:
    """The error of a compilation target; None for one that TileLang knows, on this computer or another."""
    if given is None or given in ("auto", "cutedsl") or given in tvm.target.Target.list_kinds():
        return None
    try:
        determine_target(given, return_object=True)
    except Exception as error:  # noqa: BLE001 - TileLang and TVM raise errors of any class
        return str(error).splitlines()[0] if isinstance(error, AssertionError | ValueError) else type(error).__name__
    return None


def target(given: Any) -> Any:
    """A compilation target as an object."""
    return determine_target(given, return_object=True)
