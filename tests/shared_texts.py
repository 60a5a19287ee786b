# SPDX-License-Identifier: MIT
"""Texts that TileLang has generated, shared by all processes of a run: to lower a program takes up to a second."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any


class SharedTexts:
    """Replaces the cache of `tilelang_core.compile`: keeps the texts of all functions, in a folder, by their keys."""

    def __init__(self, folder: Path):
        self._folder = folder

    def made(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the text of a key, made if no process has made it."""
        path = self._folder / hashlib.sha256(repr(key).encode()).hexdigest()
        if not path.exists():
            whole = self._folder / f"{os.getpid()}"
            whole.write_bytes(pickle.dumps(make()))
            whole.replace(path)
        return pickle.loads(path.read_bytes())
