# SPDX-License-Identifier: MIT
"""A folder that all processes of a run of the tests share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["made_once"]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled in the first process of a run that asks for `name`; others wait for it.

    After an exception the next one tries again, in another folder.
    """
    shared = Path(os.environ["TESTS_SHARED"])
    made = shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=shared))
            make(folder)
            made.write_text(str(folder), encoding="utf-8")
    return Path(made.read_text(encoding="utf-8"))
