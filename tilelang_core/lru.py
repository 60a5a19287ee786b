# SPDX-License-Identifier: MIT
"""A bounded dictionary of recent entries, for results that are recomputed often."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(dict[Key, Value], Generic[Key, Value]):
    """A cache of at most `most` entries; a new entry evicts the oldest one."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]
