# SPDX-License-Identifier: MIT
"""Independent compilations in forked processes: each leaves its kernel in the cache on disk.

Why processes: lowering holds Python's lock, and hooks of the stock compiler are global. Why forked: importing TileLang
takes longer than most compilations, and a forked process inherits it, and the programs. A forked process must not use
CUDA; compilers do not.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any

from tilescale.backends.base import Compilation
from tilescale.backends.progress import progress_bar

Job = Callable[[], Any]

COMPILING = "compiling kernels"
"""Description on a progress bar."""

STALL_S = 300.0
"""Seconds without a finished job after which the processes are ended; no compilation takes as long."""

_POLL_S = 0.02


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_missing(compilations: Sequence[Compilation], number: int = 0, ranks: int = 1) -> None:
    """Compile this rank's share of the kernels that the cache does not have. Errors surface when a kernel is loaded.

    The longest begin first, so that none is left for the end.

    Args:
        compilations: the same on each rank of a node; equal ones count once.
        number: of this rank on its node; the first one shows progress.
        ranks: number of ranks on the node.
    """
    distinct: list[Compilation] = []
    for each in compilations:
        if each not in distinct:
            distinct.append(each)
    own = sorted(distinct, key=lambda each: -each.length)[number::ranks]
    missing = [each for each in (compilation.pinned() for compilation in own) if not each.is_done]
    run_in_processes([each.run for each in missing], cores() // ranks, None if number else COMPILING)


def run_in_processes(jobs: Sequence[Job], most: int, what: str | None = None) -> None:
    """Run jobs in up to `most` processes; with one, or with one job, in this one.

    A failed job is silent: its user runs it again and gets the error. `what`: a description of the jobs for a progress
    bar; None for no bar.
    """
    if not jobs:
        return
    if min(most, len(jobs)) < 2:
        with _bar(what, len(jobs)) as advance:
            for job in jobs:
                _attempt(job)
                advance(1)
        return
    wait({Running(jobs, most): len(jobs)}, what)


class Running:
    """Jobs in forked processes, which this one does not wait for. Where nothing can be forked, they are run at once.

    A failed job is silent, as in `run_in_processes`. The processes end with this one.
    """

    def __init__(self, jobs: Sequence[Job], most: int, niceness: int = 0):
        """Begin them in up to `most` processes, whose priority is lower by `niceness`."""
        self.jobs, self._niceness, self._workers = jobs, niceness, list[Any]()
        if "fork" not in multiprocessing.get_all_start_methods():
            run_in_processes(jobs, 1)
            return
        context = multiprocessing.get_context("fork")
        self._begun, self._finished = context.Value("i", 0), context.Value("i", 0)
        _alive[:] = [*(each for each in _alive if each.sentinels), self]
        self._workers += [context.Process(target=self._work, daemon=True) for _ in range(min(most, len(jobs)))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: compilers need none of them
            for worker in self._workers:
                worker.start()

    def _work(self) -> None:
        gc.disable()  # a collection goes through all objects of a model, and copies their pages
        os.nice(self._niceness)
        parent = os.getppid()
        while os.getppid() == parent:
            with self._begun.get_lock():
                number, self._begun.value = self._begun.value, self._begun.value + 1
            if number >= len(self.jobs):
                return
            _attempt(self.jobs[number])
            with self._finished.get_lock():
                self._finished.value += 1

    @property
    def finished(self) -> int:
        """Number of jobs that have ended."""
        return self._finished.value if self._workers else len(self.jobs)

    @property
    def sentinels(self) -> list[int]:
        """One for each process that has not ended, as `connection.wait` takes them."""
        return [worker.sentinel for worker in self._workers if worker.is_alive()]

    def kill(self) -> None:
        """End its processes."""
        for worker in self._workers:
            worker.kill()
            worker.join()


_alive: list[Running] = []
"""Those whose processes may not have ended: they count jobs in shared memory, which others must not get meanwhile."""


def _bar(what: str | None, jobs: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """The bar of jobs; none without a description."""
    return progress_bar(what or "", None if what else False, jobs)


def _attempt(job: Job) -> None:
    with contextlib.suppress(Exception):
        job()


def wait(jobs: Mapping[Running, int], what: str | None = None) -> None:
    """Wait until as many jobs of each run have ended. Processes are killed where none has ended for long, or this one
    is interrupted."""
    seen, since, has_given_up = 0, time.monotonic(), True
    try:
        with _bar(what, sum(jobs.values())) as advance:
            while running := [each for run, count in jobs.items() if run.finished < count for each in run.sentinels]:
                connection.wait(running, _POLL_S)
                now = sum(min(run.finished, count) for run, count in jobs.items())
                advance(now - seen)
                if now != seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > STALL_S:
                    return
            has_given_up = False
    finally:
        if has_given_up:
            for run in jobs:
                run.kill()
