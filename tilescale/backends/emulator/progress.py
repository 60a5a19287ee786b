# SPDX-License-Identifier: MIT
"""A progress bar for emulations that take more than a moment."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tilescale.settings import settings

PATIENCE_S = 1.5
"""Seconds before a bar appears, so that short runs stay silent."""


@contextlib.contextmanager
def progress_bar(name: str, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts programs that have ended.

    Args:
        name: what runs.
        show: whether to show a bar; None follows the settings ("auto": when a person watches).
    """
    wanted = settings().progress
    if show is None:
        show = wanted == "on" or (wanted == "auto" and sys.stderr.isatty())
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("emulating {task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(name, total=None)
    begin = time.monotonic()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and time.monotonic() - begin > PATIENCE_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
