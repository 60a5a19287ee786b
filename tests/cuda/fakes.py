# SPDX-License-Identifier: MIT
"""A device that writes down what it is given, for tests of how programs are called where there is no GPU."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.support import lowered
from tilelang_core.lru import LruCache
from tilescale.backends.cuda.running import (
    call_table,
    execute,
    joined_graphs,
    kernel_graph,
    native,
    plans,
    recording,
    repeated,
    replay,
    stream_order,
)
from tilescale.backends.cuda.running.collectives import exchanges
from tilescale.backends.cuda.running.graph_nodes import CapturedNode
from tilescale.backends.cuda.running.plans import ALIGNED
from tilescale.backends.cuda.running.recording import recorded_memory
from tilescale.comm import World
from tilescale.errors import DeviceError

STREAM = 7
CPU = 1  # as DLPack numbers it


def aligned(*shape: int, grad: bool = False) -> torch.Tensor:
    """Random numbers where a GPU's allocator would put them, not adjacent to other tensors."""
    count = math.prod(shape)
    room = torch.randn(count + 2 * ALIGNED)
    first = -room.data_ptr() % ALIGNED // room.itemsize
    return room[first : first + count].view(shape).detach().requires_grad_(grad)


def record_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Record calls with tensors of the CPU, as if they were a GPU's; its GEMMs cannot be captured."""
    patch.setattr(repeated, "uses_gpus", lambda: True)
    patch.setattr(recording, "GEMMS", {})
    patch.setattr(call_table._python(), "device_type", CPU)


CONSTANT = "rows"
"""Name of a launch whose node the driver does not update."""


class Heap:
    """Symmetric tensors are those that it made; two ranks. `is_closed`: whether it makes none now."""

    SIZE = 1 << 24

    def __init__(self) -> None:
        self._memory, self._used = torch.zeros(self.SIZE, dtype=torch.uint8), 0
        first = self._memory.data_ptr()
        self.addresses = SimpleNamespace(
            stride=1 << 36, slot=lambda peer: peer, unreachable=(), size=self.SIZE, address=lambda rank: first
        )
        self.provider = "fake"
        self.device = torch.device("cpu")
        self.made: set[int] = set()
        self.is_closed = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.zeros(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.is_closed:  # they would be zero in each replay, and not before
            raise RuntimeError("operation not permitted when stream is capturing")
        nbytes = math.prod(shape) * dtype.itemsize
        tensor = self._memory[self._used : self._used + nbytes].view(dtype).view(shape)
        self._used += -(-nbytes // 256) * 256
        self.made.add(tensor.data_ptr())
        return tensor

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.made

    def offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def peers(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(2, *tensor.shape)


class Guard:
    """Barriers go to the log; `error` is what a call finds."""

    def __init__(self, log: list[Any]):
        self.log, self.limit_ns, self.error = log, 10**9, None
        self.stopped = False
        self.records = SimpleNamespace(device=torch.zeros(8, dtype=torch.int64), stop=self._stop)
        self.ranks = SimpleNamespace(everywhere=torch.zeros(2, 2), counts=torch.zeros(2))

    def _stop(self) -> None:
        self.stopped = True

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def barrier(self, site: int, call: int = 0, patience: int = 3) -> Any:
        return lambda: self.log.append(("barrier", site, call))


@dataclass(eq=False)
class Captured:
    """A captured graph, whose handles become invalid when the last reference to it is gone. It has nodes once they are
    read; those of `copies` are in the `whole`."""

    handle: int
    instantiate: Callable[[], None]
    nodes: list[CapturedNode] = field(default_factory=list)
    copies: list[Captured] = field(default_factory=list)
    whole: weakref.ref[Captured] | None = None

    @cached_property
    def executable(self) -> int:
        self.instantiate()
        return self.handle + 1


class Device:
    """Record of a program's actions on rank 0 of two.

    Attributes:
        log: kernels with their arguments, and barriers, in order.
        graphs: the captured graphs; replayed: arguments of the kernels in each replay, addresses as numbers.
        instantiated: how many of them became executable.
        events: of the device's streams.
        on_launch: called for each kernel, with its name and arguments.
        capturing: whether the caller captures a graph; broken: whether kernels fail to launch.
        refuses: whether no node can be updated; keeps_apart: whether no graph can be a part of another.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.log: list[Any] = []
        self.graphs: list[list[Any]] = []
        self.replayed: list[list[list[Any]]] = []
        self.instantiated = 0
        self._alive: weakref.WeakValueDictionary[int, Captured] = weakref.WeakValueDictionary()
        self.heap, self.guard = Heap(), Guard(self.log)
        patch.setattr(recorded_memory, "symmetric", [])  # another test's heap may have been where tensors are now
        self.capturing = self.broken = False
        self.events: list[str] = []
        self.on_launch: Callable[..., None] = lambda name, *args: None
        self.stream = STREAM
        world = self.heap.team = World(ranks=(0, 1), rank=0, launcher=None, node_of=(0, 0))
        patch.setattr(World, "device", torch.device("cpu"), raising=False)
        patch.setattr(execute, "init", lambda: world)
        patch.setattr(execute, "heap_for", lambda team: self.heap)
        patch.setattr(execute, "alike", lambda group, facts, code, make: make())
        patch.setattr(execute, "check_gpu", lambda machine, device: None)
        patch.setattr(execute, "HeapGroup", lambda world: None)
        patch.setattr(execute.DeviceProgram, "guard", self.guard)
        patch.setattr(execute.DeviceProgram, "on_all", lambda own, check: None)
        patch.setattr(execute.DeviceProgram, "_compile_ahead", lambda own: None)
        patch.setattr(execute.DeviceProgram, "compile", lambda own, func, check=None: self._kernel(func))
        patch.setattr(execute.DeviceProgram, "device_code", lambda own, text: text.encode())
        patch.setattr(exchanges, "functions", self._functions)
        patch.setattr(exchanges, "launch", lambda name, *args: lambda: self._launched(name, *args))
        for module in replay, plans, kernel_graph:
            patch.setattr(module, "captured", self._captured)
        patch.setattr(kernel_graph, "_pool", lambda: None)
        patch.setattr(kernel_graph, "_graphs", LruCache(kernel_graph.KEPT))
        patch.setattr(replay, "nodes_of", self._nodes_of)
        patch.setattr(joined_graphs, "joined", self._joined)
        patch.setattr(joined_graphs, "nodes_of", self._nodes_of)
        patch.setattr(joined_graphs, "_wholes", LruCache(joined_graphs.KEPT))
        patch.setattr(native, "connect", self._connect)
        self.refuses = self.keeps_apart = False
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda s: self.events.append(f"record {s}")))
        patch.setattr(torch.cuda, "current_stream", lambda device: self._stream())
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, raising=False)
        stream_order.stream_order.cache_clear()

    def _stream(self) -> Any:
        class Stream(int):
            def wait_event(own, event: Any) -> None:
                self.events.append(f"{own} waits")

        return Stream(self.stream)

    def _kernel(self, func: Any) -> Any:
        name = str(func.attrs["global_symbol"])
        return lambda *args: self._launched(name, *args)

    def _functions(self, code: bytes, kernel: Any, device: int | None) -> dict[bool, str]:
        names = {aligned: kernel.name(aligned) for aligned in (True, False)}
        assert all(name.encode() in code for name in names.values())
        return names

    def _launched(self, name: str, *args: Any) -> None:
        if self.broken:
            raise RuntimeError("the launch failed")
        self.log.append((name, *args))
        self.on_launch(name, *args)

    def _captured(self, launches: list[Any], pool: Any = None) -> Any:
        begin, self.heap.is_closed = len(self.log), True
        for launch in launches:
            launch()
        self.heap.is_closed = False
        entries = self.log[begin:]
        del self.log[begin:]
        return self._graph(entries)

    def _graph(self, entries: list[Any]) -> Captured:
        number = len(self.graphs)
        graph = self._alive[number] = Captured(number, self._instantiated)
        self.graphs.append(entries)
        return graph

    def _joined(self, graphs: list[int]) -> tuple[Captured, list[int]]:
        """The copies have what the graphs were captured with, not what they are passed now."""
        if self.keeps_apart:
            raise DeviceError("cuGraphAddChildGraphNode: CUDA_ERROR_NOT_SUPPORTED")
        entries = [self.graphs[number] for number in graphs]
        whole = self._graph([x for each in entries for x in each])
        whole.copies = list(map(self._graph, entries))
        for copy in whole.copies:
            copy.whole = weakref.ref(whole)
        return whole, [copy.handle for copy in whole.copies]

    def _instantiated(self) -> None:
        self.instantiated += 1

    def _nodes_of(self, handle: int) -> list[CapturedNode]:
        if handle not in self._alive:
            raise DeviceError("cuGraphGetNodes: CUDA_ERROR_INVALID_VALUE")
        graph, nodes = self._alive[handle], [node(entry) for entry in self.graphs[handle]]
        whole = graph if graph.whole is None else graph.whole()
        whole.nodes += map(weakref.proxy, nodes)  # the driver does not keep the bytes that it is passed
        return nodes

    def _connect(self) -> None:
        """Let C call this device as the driver."""
        address, number = ctypes.c_void_p, ctypes.c_int64
        setter, copier, start = (ctypes.CFUNCTYPE(ctypes.c_int, *[address] * count) for count in (3, 4, 2))
        mover = ctypes.CFUNCTYPE(ctypes.c_int, number, number, ctypes.c_size_t, address)
        refuses = lambda *given: int(self.refuses)  # noqa: E731
        self._driver = setter(refuses), copier(refuses), start(self._replay), mover(self._moved)
        native.loaded_code().plain.driver(*(ctypes.cast(f, address) for f in self._driver))

    def _moved(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.log.append("copy")
        ctypes.memmove(target, source, nbytes)
        return 0

    def _replay(self, executable: int, stream: int) -> int:
        graph = self._alive.get(executable - 1)
        if graph is None:
            return 400  # CUDA_ERROR_INVALID_HANDLE
        self.log.append("replay")
        self.replayed.append([[int.from_bytes(x, "little") for x in node.blocks] for node in graph.nodes])
        return 0

    def program(self, func: Any) -> execute.DeviceProgram:
        """The program as it runs on this rank."""
        return execute.DeviceProgram(lowered(func, devices=2).lowered, {}).build()

    def names(self) -> list[Any]:
        """Launches since the last call: kernels by name, barriers by purpose."""
        names = [entry if isinstance(entry, str) else entry[0] for entry in self.log]
        self.log.clear()
        return names


def node(entry: Any) -> CapturedNode:
    """A launch as the node of a graph: tensors by their places."""
    name, *passed = (entry,) if isinstance(entry, str) else entry
    blocks = [ctypes.create_string_buffer(data, len(data)) for data in map(_passed, passed)]
    return CapturedNode((name, *map(len, blocks)), blocks, is_constant=name == CONSTANT)


def _passed(x: Any) -> bytes:
    if isinstance(x, ctypes.Structure | bytes):
        return bytes(x)
    if torch.is_tensor(x):
        return x.data_ptr().to_bytes(8, "little")
    return (int(x) % (1 << 32)).to_bytes(4, "little") if isinstance(x, int | float) else repr(x).encode()
