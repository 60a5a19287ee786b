# SPDX-License-Identifier: MIT
"""Files that several processes write: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tilescale.errors import UsageError


def save(path: Path, text: str) -> None:
    """Write a file in one step: who reads it meanwhile sees the old contents or the new ones.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="set TILESCALE_CACHE_DIR to a folder of yours"
        ) from None
