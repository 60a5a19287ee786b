# SPDX-License-Identifier: MIT
"""`T.gemm`: TileLang's GEMM of tiles, whose errors name the user's line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tilelang_core import stock
from tilescale.errors import ShapeError
from tilescale.language.context import here

_P = ParamSpec("_P")
_R = TypeVar("_R")

_HINT = (
    "C is (M, N); A is (M, K), or (K, M) with transpose_A=True; B is (K, N), or (N, K) with transpose_B=True: change a "
    "tile's extents, or say that it lies transposed"
)


def _with_shape_errors(multiply: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(multiply)
    def gemm(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return multiply(*args, **kwargs)
        except AssertionError as error:
            raise ShapeError(str(error) or "tiles that do not make a product", hint=_HINT, where=here()) from None

    return gemm


gemm = _with_shape_errors(stock.gemm)
gemm.__doc__ = f"""{stock.gemm.__doc__ or "C += A @ B, or its form with transposed operands, of tiles."}

    Raises:
        ShapeError: extents of the operands that do not fit together.
    """
