# SPDX-License-Identifier: MIT
"""Files of caches, which processes and threads write concurrently: there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file, to be written, that replaces `path` in one step; it is removed if the body fails.

    The temporary name is unique, so writers never see each other's files, nor a planted link. Raises OSError: the
    folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        yield made
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
