# SPDX-License-Identifier: MIT
"""Nodes of captured CUDA graphs as bytes: what kernels and copies are passed, read and set.

What the kernels and one-dimensional copies of an instantiated graph are passed can be set anew; a replay that is
enqueued already keeps what it had (CUDA driver API, cuGraphExecKernelNodeSetParams, cuGraphExecMemcpyNodeSetParams).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilescale.backends.cuda.running import driver

_MOST_NODES = 4096

_LAUNCH = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")

_FILL = ("dst", "pitch", "value", "elementSize", "width", "height")

_COPY = (
    *("WidthInBytes", "Height", "Depth", "srcMemoryType", "dstMemoryType", "srcXInBytes", "srcY", "srcZ", "srcLOD"),
    *("dstXInBytes", "dstY", "dstZ", "dstLOD", "srcPitch", "srcHeight", "dstPitch", "dstHeight"),
)

_SOURCE, _TARGET = 48, 136
"""Where the addresses of a copy are in CUDA_MEMCPY3D."""

_WITHOUT_TENSORS = ("EMPTY", "EVENT_RECORD", "WAIT_EVENT", "BATCH_MEM_OP")
"""Kinds of nodes that name no tensor of a call: flags that streams wait for and write stay in their places."""


Block = ctypes.Array
"""Bytes that can be written, with an address."""


@dataclass(frozen=True)
class Node:
    """Work of a captured graph.

    Attributes:
        same: what cannot be set, equal for nodes of which one can stand for the other.
        blocks: the bytes of each parameter that can be set; a node of an instantiated graph that is set gets them.
        handle: the driver's, of the node.
        parameters: where the driver's structure of them is.
        context: of a copy; 0 of a kernel.
        kept: what has to live as long.
    """

    same: tuple[Any, ...]
    blocks: Sequence[Block] = ()
    handle: int = 0
    parameters: int = 0
    context: int = 0
    kept: Any = None


def nodes_of(graph: int) -> list[Node]:
    """The nodes of a captured graph, in the order in which they were captured."""
    from cuda.bindings import driver as names

    handles, *_ = driver.results("cuGraphGetNodes", names.CUgraph(graph), _MOST_NODES)
    return [_node(handle) for handle in handles if int(handle)]


def _node(handle: Any) -> Node:
    kind = driver.call("cuGraphNodeGetType", handle).name.removeprefix("CU_GRAPH_NODE_TYPE_")
    if kind in _READ:
        return _READ[kind](handle)
    return Node((kind,)) if kind in _WITHOUT_TENSORS else _unknown(kind)


def _unknown(kind: str) -> Node:
    """A node that no other one equals."""
    return Node((kind, object()))


def _kernel(handle: Any) -> Node:
    found = driver.call("cuGraphKernelNodeGetParams", handle)
    sizes = _parameter_sizes(found.func)
    if sizes is None or not found.kernelParams:
        return _unknown("KERNEL")
    given = (ctypes.c_void_p * len(sizes)).from_address(int(found.kernelParams))
    own = [ctypes.create_string_buffer(ctypes.string_at(at, n), n) for at, n in zip(given, sizes, strict=True)]
    pointers = (ctypes.c_void_p * len(own))(*map(ctypes.addressof, own))
    found.kernelParams = ctypes.addressof(pointers)
    same = ("KERNEL", int(found.func), *(int(getattr(found, name)) for name in _LAUNCH))
    return Node(same, own, int(handle), found.getPtr(), kept=(found, pointers))


_sizes: dict[int, list[int] | None] = {}


def _parameter_sizes(function: Any) -> list[int] | None:
    """Bytes of each parameter of a kernel; None if the driver does not say."""
    number = int(function)
    if number not in _sizes:
        _sizes[number] = _asked_sizes(function) if number else None
    return _sizes[number]


def _asked_sizes(function: Any) -> list[int] | None:
    ask = driver.function("cuFuncGetParamInfo")
    sizes: list[int] = []
    try:
        while not (found := ask(function, len(sizes)))[0]:
            sizes.append(int(found[2]))
    except RuntimeError:  # a driver older than 12.4
        return None
    return sizes


def _copy(handle: Any) -> Node:
    found = driver.call("cuGraphMemcpyNodeGetParams", handle)
    same = ("MEMCPY", *(int(getattr(found, name)) for name in _COPY))
    places = int(found.dstDevice), int(found.srcDevice)
    if found.Height > 1 or found.Depth > 1:  # it cannot be set
        return Node((*same, *places))
    first = found.getPtr()
    blocks = [(ctypes.c_char * 8).from_address(first + at) for at in (_TARGET, _SOURCE)]
    return Node(same, blocks, int(handle), first, int(driver.call("cuCtxGetCurrent")), found)


def _fill(handle: Any) -> Node:
    found = driver.call("cuGraphMemsetNodeGetParams", handle)
    return Node(("MEMSET", *(int(getattr(found, name)) for name in _FILL)))


_READ = {"KERNEL": _kernel, "MEMCPY": _copy, "MEMSET": _fill}
