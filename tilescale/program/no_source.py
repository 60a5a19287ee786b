# SPDX-License-Identifier: MIT
"""The error for a function whose source TileLang cannot read, in place of Python's."""

from __future__ import annotations

from types import FunctionType

from tilelang_core import upstream_errors
from tilescale.errors import Location, UsageError


class NoSourceError(UsageError, OSError):
    """A function whose source cannot be read. Python's error too."""


def _no_source(func: FunctionType) -> NoSourceError:
    return NoSourceError(
        f"the source of {func.__name__!r} cannot be read: it comes from standard input, a prompt or exec()",
        hint="write the program to a file and run that file: TileLang reads the lines of a function",
        where=Location(func.__code__.co_filename, func.__code__.co_firstlineno),
    )


upstream_errors.raises_without_source(_no_source)
