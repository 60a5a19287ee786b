# SPDX-License-Identifier: MIT
"""Results on disk, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from tilelang_core.files import replacing
from tilescale.errors import UsageError


def save(path: Path, text: str) -> None:
    """Write a file in one step: a concurrent reader sees the old contents or the new ones. Raises UsageError: the
    folder cannot be made or written."""
    try:
        with replacing(path) as made:
            made.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="set TILESCALE_CACHE_DIR to a folder of yours"
        ) from None
