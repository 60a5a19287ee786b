# SPDX-License-Identifier: MIT
"""Idle time of a GPU by a trace of its activities, through PyTorch's profiler (CUPTI)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

Span = tuple[int, int]
"""Begin and end of an activity, in nanoseconds."""


def idle_percent(call: Callable[[], Any], calls: int = 4) -> float:
    """Percentage of the time of consecutive calls in which the current GPU runs no kernel, copy or fill.

    The time is that from the begin of the first traced activity to the end of the last one. Kernels that wait for other
    ranks count as activity. A call before is not traced.
    """
    import torch

    call()
    torch.cuda.synchronize()
    with device_trace() as spans:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return 100 * idle_share(spans)


def idle_share(spans: Sequence[Span]) -> float:
    """The share of the time between the first begin and the last end that no span covers; 1 without spans."""
    if not spans:
        return 1.0
    in_order = sorted(spans)
    first = end = in_order[0][0]
    idle = 0
    for begin, finish in in_order:
        idle += max(begin - end, 0)
        end = max(end, finish)
    return idle / max(end - first, 1)


@contextmanager
def device_trace() -> Iterator[list[Span]]:
    """Trace the GPUs of this process; the list is filled at the end.

    The profiler is active in a thread of its own, as operators take other paths in a thread that is profiled.
    """
    spans: list[Span] = []
    begun, done = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1, "tilescale-trace") as pool:
        traced = pool.submit(_spans, begun, done)
        begun.wait()
        try:
            yield spans
        finally:
            done.set()
        spans += traced.result()


def _spans(begun: threading.Event, done: threading.Event) -> list[Span]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            begun.set()
            done.wait()
    finally:
        begun.set()
    found = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [(x.start_ns(), x.start_ns() + x.duration_ns()) for x in found if x.device_type() == DeviceType.CUDA]
