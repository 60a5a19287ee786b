# SPDX-License-Identifier: MIT
"""Texts that TileLang has generated, shared by all processes of a run: to lower a program takes up to a second."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Hashable
from pathlib import Path
from typing import Any


class SharedTexts:
    """Stands for what `tilelang_core.compile` keeps of the last functions: keeps all, in a folder, by their keys."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __contains__(self, key: Hashable) -> bool:
        return self._path(key).exists()

    def __getitem__(self, key: Hashable) -> Any:
        return pickle.loads(self._path(key).read_bytes())

    def __setitem__(self, key: Hashable, made: Any) -> None:
        whole = self._folder / f"{os.getpid()}"
        whole.write_bytes(pickle.dumps(made))
        whole.replace(self._path(key))

    def _path(self, key: Hashable) -> Path:
        return self._folder / hashlib.sha256(repr(key).encode()).hexdigest()
