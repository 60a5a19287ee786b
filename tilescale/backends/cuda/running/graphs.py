# SPDX-License-Identifier: MIT
"""CUDA graphs of the driver's: captured launches, and graphs of graphs.

PyTorch's `CUDAGraph` is for graphs that a user captures: it keeps the state of random numbers, and takes the host 1 ms
to capture and instantiate, where the driver takes a tenth.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch

from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.steps import StreamWork, run
from tilescale.backends.cuda.running.streams import own_stream

_FLAGS = 1 | 8
"""CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH and _USE_NODE_PRIORITY, as in PyTorch's graphs: memory of the driver
is freed before it is allocated again, and nodes have the priorities of their streams."""


class LaunchGraph:
    """A graph of the driver's, which ends with this object."""

    def __init__(self, handle: Any, kept: Any = None):
        """`handle`: of the driver; `kept`: must live as long as the graph."""
        self._graph, self._kept = handle, kept
        weakref.finalize(self, driver.function("cuGraphDestroy"), handle).atexit = False

    @property
    def handle(self) -> int:
        """The driver's handle of the graph, whose nodes can be read."""
        return int(self._graph)

    @cached_property
    def executable(self) -> int:
        """The driver's handle of the graph once it is instantiated. Raises DeviceError: it cannot be."""
        made = driver.call("cuGraphInstantiate", self._graph, _FLAGS)
        weakref.finalize(self, driver.function("cuGraphExecDestroy"), made).atexit = False
        return int(made)


def captured(launches: Sequence[StreamWork], pool: torch.cuda.MemPool | None = None) -> LaunchGraph:
    """The graph of launches, which do not run. They allocate from a pool, or None from one of the graph's own.

    Raises DeviceError: a launch cannot be captured.
    """
    from cuda.bindings import driver as names

    own, stream = pool or torch.cuda.MemPool(), _stream(torch.cuda.current_device())
    handle = names.CUstream(stream.cuda_stream)
    # The caller's stream may be the default one, which cannot be captured. Other threads may allocate meanwhile, and
    # this one may load kernels: neither is a part of the capture.
    relaxed = names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(own):
        driver.call("cuStreamBeginCapture", handle, relaxed)
        with _ended(handle):
            run(launches)
        return LaunchGraph(driver.call("cuStreamEndCapture", handle), own)


@contextmanager
def _ended(stream: Any) -> Iterator[None]:
    """End the capture of a stream on an error."""
    try:
        yield
    except BaseException:
        _, graph = driver.function("cuStreamEndCapture")(stream)
        if int(graph):
            driver.function("cuGraphDestroy")(graph)
        raise


def joined(graphs: Sequence[int]) -> tuple[LaunchGraph, list[int]]:
    """A graph of copies of graphs, each after the one before, and the handles of the copies. Raises DeviceError: the
    driver refuses one."""
    from cuda.bindings import driver as names

    handle = driver.call("cuGraphCreate", 0)
    whole, copies = LaunchGraph(handle), []
    before: list[Any] = []
    for graph in graphs:
        before = [driver.call("cuGraphAddChildGraphNode", handle, before, len(before), names.CUgraph(graph))]
        copies.append(int(driver.call("cuGraphChildGraphNodeGetGraph", *before)))
    return whole, copies


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream to capture on."""
    return own_stream(torch.device("cuda", device))
