# SPDX-License-Identifier: MIT
"""TileLang's log output during our compilations, at our logger's level, so that it is off by default.

`logging.getLogger("tilescale").setLevel("INFO")` shows it. Programs that call TileLang themselves log as before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

LOGGER = "tilescale"

_ADVICE = "consider using `@tilelang.jit`"
"""Text of TileLang's warning about compiling a function twice. It does not apply: a barrier of ranks is a part of many
programs."""

_following: ContextVar[bool] = ContextVar("following", default=False)


class _Follows(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        level = logging.INFO if _ADVICE in str(record.msg) else record.levelno
        return not _following.get() or logging.getLogger(LOGGER).isEnabledFor(level)


def install() -> None:
    """Let TileLang's handlers ask. Handlers, as a logger's filters do not see records of the loggers below it."""
    for handler in logging.getLogger("tilelang").handlers:
        if not any(isinstance(known, _Follows) for known in handler.filters):
            handler.addFilter(_Follows())


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Make TileLang's log output follow our logger."""
    token = _following.set(True)
    try:
        yield
    finally:
        _following.reset(token)
