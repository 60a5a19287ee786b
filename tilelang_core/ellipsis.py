# SPDX-License-Identifier: MIT
"""`X[i, ...]` of buffers: an Ellipsis stands for as many whole dimensions as are left, as in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx


def install() -> None:
    """Let buffers take an Ellipsis where they are read, or passed as tiles."""
    tirx.Buffer.__getitem__ = _expanding(tirx.Buffer.__getitem__)


def _expanding(stock: Callable[[tirx.Buffer, Any], Any]) -> Callable[[tirx.Buffer, Any], Any]:
    def getitem(buffer: tirx.Buffer, index: Any) -> Any:
        indices = [*index] if isinstance(index, tuple | list) else [index]
        places = [place for place, i in enumerate(indices) if i is ...]
        if not places:
            return stock(buffer, index)
        if len(places) > 1:
            raise IndexError(f"{buffer.name}: an index has at most one Ellipsis, here are {len(places)}")
        left = len(buffer.shape) - len(indices) + 1
        indices[places[0] : places[0] + 1] = [slice(None)] * left
        return stock(buffer, indices)

    return getitem
