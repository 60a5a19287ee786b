# SPDX-License-Identifier: MIT
"""Classes of TVM's objects, and elements of its arrays, without detours: analyses ask for them millions of times.

The metaclass of TVM's classes is an ABCMeta, whose `isinstance` looks for registered classes, of which there are none.
An array asked for its length before each element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm_ffi import Array, Object, _ffi_api

_stock_item = Array.__getitem__


def install() -> None:
    """Let TVM's classes check instances as plain classes do, and arrays be read directly."""
    type(Object).__instancecheck__ = type.__instancecheck__  # type: ignore[method-assign]
    Array.__iter__ = _elements  # type: ignore[method-assign]
    Array.__getitem__ = _item  # type: ignore[method-assign]


def _elements(array: Array[Any]) -> Iterator[Any]:
    element = _ffi_api.ArrayGetItem
    return iter([element(array, i) for i in range(_ffi_api.ArraySize(array))])


def _item(array: Array[Any], index: Any) -> Any:
    if type(index) is int and 0 <= index < _ffi_api.ArraySize(array):
        return _ffi_api.ArrayGetItem(array, index)
    return _stock_item(array, index)
