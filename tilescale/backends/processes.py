# SPDX-License-Identifier: MIT
"""Independent compilations in forked processes: each leaves its kernel in the cache on disk.

Why processes: lowering holds Python's lock, and hooks of the stock compiler are global. Why forked: importing TileLang
takes longer than most compilations, and a forked process inherits it, and the programs. A forked process must not use
CUDA; compilers do not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from tilescale.backends.base import Compilation
from tilescale.backends.progress import progress_bar

COMPILING = "compiling kernels"
"""Description on a progress bar."""

STALL_S = 300.0
"""Seconds without a finished job after which the processes are ended; no compilation takes as long."""

_POLL_S = 0.1


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


def run_in_processes(jobs: Sequence[Callable[[], Any]], most: int, what: str | None = None) -> None:
    """Run jobs in up to `most` processes; with one, or with one job, in this one.

    A failed job is silent: its user runs it again and gets the error.

    Args:
        what: a description of the jobs for a progress bar; None for no bar.
    """
    if min(most, len(jobs)) < 2 or "fork" not in multiprocessing.get_all_start_methods():
        for job in jobs:
            _attempt(job)
        return
    context = multiprocessing.get_context("fork")
    begun, finished = context.Value("i", 0), context.Value("i", 0)

    def work() -> None:
        while True:
            with begun.get_lock():
                number, begun.value = begun.value, begun.value + 1
            if number >= len(jobs):
                return
            _attempt(jobs[number])
            with finished.get_lock():
                finished.value += 1

    workers = [context.Process(target=work, daemon=True) for _ in range(min(most, len(jobs)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: compilers need none of them
        for worker in workers:
            worker.start()
    _wait(workers, lambda: finished.value, len(jobs), what)


def _attempt(job: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        job()


def _wait(workers: Sequence[Any], finished: Callable[[], int], total: int, what: str | None) -> None:
    """Wait for processes. They are killed where no job has finished for long, or this process is interrupted."""
    seen, since = 0, time.monotonic()
    try:
        with progress_bar(what or "", None if what else False, total) as advance:
            while running := [worker.sentinel for worker in workers if worker.is_alive()]:
                connection.wait(running, _POLL_S)
                now = finished()
                advance(now - seen)
                if now != seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > STALL_S:
                    return
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
