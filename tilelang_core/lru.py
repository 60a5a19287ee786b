# SPDX-License-Identifier: MIT
"""A bounded dictionary of recent entries, for results that are recomputed often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(OrderedDict[Key, Value], Generic[Key, Value]):
    """A cache of at most `most` entries; a new entry evicts the least recently used one."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)

    def get(self, key: Key, default: Any = None) -> Any:
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def made(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the entry of a key, made if it is missing."""
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        return self[key]
