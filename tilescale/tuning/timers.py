# SPDX-License-Identifier: MIT
"""Timers of races on GPUs: device time by events, the same for calls in a CUDA graph, and time on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

GRAPH_CALLS = 10
"""Calls that a graph holds."""


class EagerTimer:
    """Device time of calls that follow one another on the current stream."""

    def barrier(self) -> None:
        """All ranks' devices are idle, and the ranks start together."""
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
            torch.cuda.synchronize()

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        """As `race.Timer`."""
        return lambda calls: _between_events(call, calls)


class GraphTimer(EagerTimer):
    """Device time of a call inside a CUDA graph of several."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        """As `race.Timer`; captures."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        self.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                call()
        self.barrier()

        def group(calls: int, works_on: object = call) -> float:  # the graph holds addresses: their tensors must live
            return _between_events(graph.replay, calls) / GRAPH_CALLS

        return group


class HostTimer(EagerTimer):
    """Time until a call returns on the host, the device far from being the limit."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        """As `race.Timer`."""

        def group(calls: int) -> float:
            call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            us = (time.perf_counter() - begin) * 1e6 / calls
            torch.cuda.synchronize()
            return us

        return group


TIMERS = {"eager": EagerTimer, "graph": GraphTimer, "host": HostTimer}
"""Mode of a race -> its timer."""


def _between_events(call: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls
