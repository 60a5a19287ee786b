# SPDX-License-Identifier: MIT
"""Failures of writing a drawing, as TileScale's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike, fspath

from tilescale.errors import UsageError


@contextlib.contextmanager
def writing(path: str | PathLike[str]) -> Iterator[None]:
    """Statements that write a file. Raises UsageError: the operating system refuses."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{fspath(path)!r} cannot be written: {error.strerror}", hint="name a file in a folder that exists"
        ) from None
