# SPDX-License-Identifier: MIT
"""Launches as a CUDA graph, whose kernels may be passed other arguments in each replay.

What the kernels of an instantiated graph are passed can be set anew; a replay that is enqueued already keeps what it
had (CUDA driver API, Graph Management, cuGraphExecKernelNodeSetParams). So one graph serves calls whose tensors lie in
different places, for the price of its kernels' launches alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.own_streams import own_stream
from tilescale.backends.cuda.running.steps import KernelLaunch, Work

if TYPE_CHECKING:
    import torch


class Replay:
    """The graph of a call's launches."""

    def __init__(self, launches: Sequence[Work]) -> None:
        """Capture them; nothing runs yet."""
        import torch

        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._nodes: list[Any] = []  # of kernels whose arguments may change, in order
        self._given: list[tuple[Any, ...]] = []  # what they are passed of a call's arguments
        # Other threads may allocate meanwhile, and this one may load kernels: that is no part of it.
        with _side_stream() as stream:
            self._graph.capture_begin(capture_error_mode="relaxed")
            try:
                for launch in launches:
                    launch()
                    if isinstance(launch, KernelLaunch):
                        self._nodes.append(_last_node(launch.stream.cuda_stream if launch.stream else stream))
                        self._given.append(launch.given())
            finally:
                self._graph.capture_end()
        self._graph.instantiate()
        self._start, self._executable = driver.function("cuGraphLaunch"), _executable(self._graph)

    def run(self, kernels: Sequence[KernelLaunch], stream: int) -> bool:
        """Replay it on a stream with the arguments of these kernels: those among the launches, or of a call alike.

        Whether any had to be set anew.
        """
        is_set = False
        for i, kernel in enumerate(kernels):
            given = kernel.given()
            if given != self._given[i]:
                self._set(self._nodes[i], kernel)
                self._given[i], is_set = given, True
        # As PyTorch's replay, which also sees to random numbers, in less time.
        (status,) = self._start(self._executable, stream)
        if status:
            raise driver.refused("cuGraphLaunch", status)
        return is_set

    def _set(self, node: Any, kernel: KernelLaunch) -> None:
        """Pass what another launch of the kernel of a node passes."""
        from cuda.bindings import driver as names

        with _side_stream() as stream:
            driver.call("cuStreamBeginCapture", stream, names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                kernel.launch()
            finally:
                alone = driver.call("cuStreamEndCapture", stream)
        try:
            (other,) = driver.results("cuGraphGetNodes", alone, 2)[0][:1]
            parameters = driver.call("cuGraphKernelNodeGetParams", other)
            driver.call("cuGraphExecKernelNodeSetParams", self._executable, node, parameters)
        finally:
            driver.call("cuGraphDestroy", alone)


def _executable(graph: torch.cuda.CUDAGraph) -> Any:
    """An instantiated graph as the driver takes it."""
    from cuda.bindings import driver as names

    return names.CUgraphExec(graph.raw_cuda_graph_exec())


def _last_node(stream: int) -> Any:
    """What the next work of a stream that is captured will follow: the node of the last one."""
    _, _, _, nodes, *_ = driver.results("cuStreamGetCaptureInfo", stream)
    (node,) = nodes
    return node


@contextmanager
def _side_stream() -> Iterator[int]:
    """The stream to capture on, as the current one: the caller's may be the default one, which cannot."""
    import torch

    stream = _stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        yield int(stream.cuda_stream)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    import torch

    return own_stream(torch.device("cuda", device))
