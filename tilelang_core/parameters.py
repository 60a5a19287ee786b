# SPDX-License-Identifier: MIT
"""Separate tensors for parameters that are annotated with one `T.Tensor` object.

`Tile = T.Tensor((64, 64), "float32")`, then `def f(X: Tile, Y: Tile)`: stock TileLang 0.1.15 makes X and Y one buffer,
so that loads from X read Y.
"""

from __future__ import annotations

from typing import Any

from tilelang.language.eager.builder import Builder
from tvm import tirx

_GIVEN = "_tilelang_core_given"
"""The attribute of a builder with the buffers of the parameters."""


def install() -> None:
    """Let each parameter of a traced function have a separate buffer; a second call does nothing."""
    stock = Builder.prim_func_arg
    if getattr(stock, _GIVEN, False):
        return

    def parameter(self: Builder, name: str, value: Any) -> Any:
        given: list[tirx.Buffer] = self.__dict__.setdefault(_GIVEN, [])
        if isinstance(value, tirx.Buffer):
            if any(value.same_as(other) for other in given):
                value = tirx.decl_buffer(value.shape, value.dtype, name, strides=value.strides, scope=value.scope())
            given.append(value)
        return stock(self, name, value)

    setattr(parameter, _GIVEN, True)
    Builder.prim_func_arg = parameter
