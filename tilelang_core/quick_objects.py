# SPDX-License-Identifier: MIT
"""Classes of TVM's objects, elements of its arrays and its analyzers without detours: analyses ask for them millions of
times.

The metaclass of TVM's classes is an ABCMeta, whose `isinstance` looks for registered classes, of which there are none.
An array asked for its length before each element. An analyzer looked up its twenty functions, of which most need one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.arith import Analyzer
from tvm_ffi import Array, Object, _ffi_api

_stock_item = Array.__getitem__

_OTHER_NAMES = {"_simplify": "Simplify", "_clone_factory": "clone"}
"""Functions of an analyzer whose name is not that of its attribute."""


def install() -> None:
    """Let TVM's classes check instances as plain classes do, arrays be read directly, and analyzers find a function at
    its first use."""
    type(Object).__instancecheck__ = type.__instancecheck__  # type: ignore[method-assign]
    Array.__iter__ = _elements  # type: ignore[method-assign]
    Array.__getitem__ = _item  # type: ignore[method-assign]
    Analyzer._assign_functions = _keep_factory
    Analyzer.__getattr__ = _function


def _elements(array: Array[Any]) -> Iterator[Any]:
    element = _ffi_api.ArrayGetItem
    return iter([element(array, i) for i in range(_ffi_api.ArraySize(array))])


def _item(array: Array[Any], index: Any) -> Any:
    if type(index) is int and 0 <= index < _ffi_api.ArraySize(array):
        return _ffi_api.ArrayGetItem(array, index)
    return _stock_item(array, index)


def _keep_factory(analyzer: Any, factory: Any) -> None:
    analyzer._factory = factory


def _function(analyzer: Any, name: str) -> Any:
    is_own = name.startswith("_") and not name.startswith("__") and name != "_factory"
    function = analyzer._factory(_OTHER_NAMES.get(name, name[1:])) if is_own else None
    if function is None:
        raise AttributeError(f"{type(analyzer).__name__} has no attribute {name}")
    analyzer.__dict__[name] = function
    return function
