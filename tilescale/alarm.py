# SPDX-License-Identifier: MIT
"""A bound on the time that Python code takes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from time import monotonic
from types import FrameType

AGAIN_S = 5.0
"""Seconds until an error is raised again: one in a destructor, or in a function of the garbage collector, is lost."""


@contextlib.contextmanager
def raise_after(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the code inside after `seconds`, and again every `AGAIN_S` seconds.

    Nothing happens where the system cannot interrupt it: in other threads than the main one, and without SIGALRM.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise error

    before, begin = signal.signal(signal.SIGALRM, interrupt), monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)  # of a bound around this one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (monotonic() - begin), 1e-6), again)
