# SPDX-License-Identifier: MIT
"""A progress bar of measurements, on the first rank, if its output is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilescale.settings import settings

Item = TypeVar("Item")


class ProgressSteps:
    """Steps that are counted; without a bar nothing is shown."""

    def __init__(self, bar: Progress | None = None):
        self._bar = bar
        self._task = bar.add_task("", total=0) if bar is not None else None

    def begin(self, total: int, what: str) -> None:
        """Announce `total` more steps of this kind."""
        if self._bar is not None and self._task is not None:
            done = self._bar.tasks[0].completed
            self._bar.update(self._task, total=done + total, description=what)

    def step(self, what: str | None = None) -> None:
        """One more is under way; `what` says which."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
            if what is not None:
                self._bar.update(self._task, description=what)

    def over(self, items: Sequence[Item], what: str) -> Iterable[Item]:
        self.begin(len(items), what)
        for item in items:
            yield item
            self.step()


@contextlib.contextmanager
def steps(rank: int) -> Iterator[ProgressSteps]:
    """Steps with a bar, if this is the first rank and the settings, or "auto" and a terminal, want one."""
    wanted = settings().progress
    if rank or not (wanted == "on" or (wanted == "auto" and sys.stderr.isatty())):
        yield ProgressSteps()
        return
    columns = (TextColumn("{task.description:>32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield ProgressSteps(bar)
