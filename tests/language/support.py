# SPDX-License-Identifier: MIT
"""A program around statements of a block that speak of devices."""

from collections.abc import Callable
from typing import Any

import tilescale.language as T


def on_devices(statements: Callable[..., Any], *, devices: Any = 4) -> Any:
    """Traces the macro `statements(X, tile, flags, reals, bx)` in a block inside T.Scale("device").

    X is a tensor and `tile` a tile in shared memory, both (64, 64) float32; flags are integers, reals are not.
    """

    @T.prim_func
    def f(X: T.Tensor((64, 64), "float32"), flags: T.Tensor((8,), "int32"), reals: T.Tensor((8,), "float32")):
        with T.Kernel(device=devices, block=8, threads=256) as bx:
            tile = T.alloc((64, 64), "float32")
            with T.Scale("block"), T.Scale("device"):
                statements(X, tile, flags, reals, bx)

    return f
