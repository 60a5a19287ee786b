# SPDX-License-Identifier: MIT
"""Graphs of the driver's: captures, graphs of graphs, and their ends."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as names

from tilescale.backends.cuda.running import driver, graphs
from tilescale.errors import DeviceError

STREAM, GRAPH, EXECUTABLE = 100, 1000, 2000


class Driver:
    """A driver, and PyTorch, that note what they are asked for. `refuses`: a function that fails."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.done: list[str] = []
        self.refuses = ""
        self._count = 0
        patch.setattr(driver, "function", lambda name: lambda *given: self._asked(name, *given))
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        patch.setattr(torch.cuda, "stream", lambda stream: self._within(f"on {stream.cuda_stream}"))
        patch.setattr(torch.cuda, "MemPool", lambda: "a pool")
        patch.setattr(torch.cuda, "use_mem_pool", lambda pool: self._within(f"from {pool}"))
        patch.setattr(graphs, "_stream", lambda device: SimpleNamespace(cuda_stream=STREAM + device))

    def _asked(self, name: str, *given: Any) -> tuple[Any, ...]:
        self.done.append(" ".join([name.removeprefix("cu"), *(str(int(x)) for x in given if not isinstance(x, list))]))
        if name == self.refuses:
            return names.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        if name in ("cuStreamBeginCapture", "cuGraphDestroy", "cuGraphExecDestroy"):
            return (0,)
        self._count += 1
        return 0, (EXECUTABLE if name == "cuGraphInstantiate" else GRAPH) + self._count

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.done.append(what)
        yield
        self.done.append(f"not {what}")

    def told(self) -> list[str]:
        """Calls since the last one of this."""
        done, self.done = self.done, []
        return done


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_launches_are_captured_on_a_stream_of_their_own(told: Driver):
    launches: list[Callable[[], None]] = [lambda: told.done.append("launch"), lambda: told.done.append("another")]
    graph = graphs.captured(launches)
    capture = ["StreamBeginCapture 101 2", "launch", "another", "StreamEndCapture 101"]
    assert told.told() == ["on 101", "from a pool", *capture, "not from a pool", "not on 101"], "2: relaxed"
    assert graph.handle == GRAPH + 1 and graph.executable == graph.executable == EXECUTABLE + 2
    assert told.told() == ["GraphInstantiate 1001 9"], "once"
    graphs.captured([], "another pool")
    assert told.told()[1] == "from another pool"


def test_a_graph_ends_with_its_object(told: Driver):
    graph = graphs.captured([])
    graph.executable  # noqa: B018 - instantiated
    told.told()
    del graph
    gc.collect()
    assert sorted(told.told()) == ["GraphDestroy 1001", "GraphExecDestroy 2002"]


def test_a_capture_ends_where_a_launch_fails(told: Driver):
    def fails() -> None:
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        graphs.captured([fails])
    assert told.told()[3:] == ["StreamEndCapture 101", "GraphDestroy 1001"]


@pytest.mark.parametrize("refuses", ["cuStreamEndCapture", "cuGraphInstantiate"])
def test_what_the_driver_refuses_is_named(told: Driver, refuses: str):
    told.refuses = refuses
    with pytest.raises(DeviceError, match=f"{refuses}: CUDA_ERROR_NOT_SUPPORTED"):
        graphs.captured([]).executable  # noqa: B018


def test_joined_graphs_are_in_order(told: Driver):
    whole, copies = graphs.joined([7, 8])
    first, second = (f"GraphAddChildGraphNode 1001 {count} {graph}" for count, graph in ((0, 7), (1, 8)))
    steps = [first, "GraphChildGraphNodeGetGraph 1002", second, "GraphChildGraphNodeGetGraph 1004"]
    assert told.told() == ["GraphCreate 0", *steps]
    assert (whole.handle, copies) == (GRAPH + 1, [GRAPH + 3, GRAPH + 5])
    told.refuses = "cuGraphAddChildGraphNode"
    with pytest.raises(DeviceError, match="NOT_SUPPORTED"):
        graphs.joined([7])
    gc.collect()
    assert "GraphDestroy 1006" in told.told()
