# SPDX-License-Identifier: MIT
"""A progress bar for work that takes more than a moment."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

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
    bar, begin = Progress(*columns, console=Console(stderr=True), transient=True), time.monotonic()
    task = bar.add_task(description, total=total)

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and time.monotonic() - begin > PATIENCE_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
