# SPDX-License-Identifier: MIT
"""A progress bar for work that takes more than a moment."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

from tilescale.settings import settings

PATIENCE_S = 1.5
"""Seconds before a bar appears, so that short work stays silent."""


@contextlib.contextmanager
def progress_bar(
    description: str, show: bool | None = None, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Show the number of finished units of work on stderr. Yields a function that adds to the number.

    Args:
        description: a description of the work.
        show: whether to show a bar; None follows the settings ("auto": when a person watches).
        total: number of units of work; None where it is unknown.
    """
    wanted = settings().progress
    if show is None:
        show = wanted == "on" or (wanted == "auto" and sys.stderr.isatty())
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shape = SpinnerColumn() if total is None else BarColumn()
    columns = (TextColumn("{task.description}"), shape, MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    timer = threading.Timer(PATIENCE_S, bar.start)  # at this time, as the first unit of work may be the only one
    timer.daemon = True
    timer.start()
    try:
        yield partial(bar.advance, bar.add_task(description, total=total))
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
