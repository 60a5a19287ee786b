# SPDX-License-Identifier: MIT
"""Nodes of captured CUDA graphs as bytes: what kernels and copies are passed, read and set.

What the kernels and one-dimensional copies of an instantiated graph are passed can be set anew; a replay that is
enqueued already keeps what it had (CUDA driver API, cuGraphExecKernelNodeSetParams, cuGraphExecMemcpyNodeSetParams).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tilescale.backends.cuda.running import driver
from tilescale.errors import DeviceError

_MOST_NODES = 4096

_LAUNCH = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")

_FILL = ("dst", "pitch", "value", "elementSize", "width", "height")

_COPY = (
    *("WidthInBytes", "Height", "Depth", "srcMemoryType", "dstMemoryType", "srcXInBytes", "srcY", "srcZ", "srcLOD"),
    *("dstXInBytes", "dstY", "dstZ", "dstLOD", "srcPitch", "srcHeight", "dstPitch", "dstHeight"),
)

_WITHOUT_TENSORS = ("EMPTY", "EVENT_RECORD", "WAIT_EVENT", "BATCH_MEM_OP")
"""Kinds of nodes that name no tensor of a call: flags that streams wait for and write stay in their places."""


@dataclass(frozen=True)
class Node:
    """Work of a captured graph.

    Attributes:
        same: what cannot be set, equal for nodes of which one can stand for the other.
        blocks: the bytes of each parameter that can be set; writable.
        set: passes what is in the blocks in the next replays of an instantiated graph. Raises DeviceError.
        launch: does the work by itself on a stream, passed what is in the blocks; None where a graph has to. Raises
            DeviceError.
        handle: the node; `after` are those that it follows.
    """

    same: tuple[Any, ...]
    blocks: list[memoryview] = field(default_factory=list)
    set: Callable[[Any], None] = lambda executable: None
    launch: Callable[[int], None] | None = None
    handle: int = 0
    after: tuple[int, ...] = ()


def in_a_row(nodes: Sequence[Node]) -> bool:
    """Whether nodes can be launched one after the other on a stream, without a graph."""
    alone = all(node.launch is not None for node in nodes)
    return alone and all(node.after == (before.handle,) for before, node in pairwise(nodes))


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
    start = driver.function("cuGraphExecKernelNodeSetParams")

    def set_parameters(executable: Any, _kept: object = pointers) -> None:
        (status,) = start(executable, handle, found)
        if status:
            raise driver.refused("cuGraphExecKernelNodeSetParams", status)

    shape = [int(getattr(found, name)) for name in _LAUNCH]
    same, blocks = ("KERNEL", int(found.func), *shape), [memoryview(part).cast("B") for part in own]
    after = _followed(handle)
    if after is None:
        return Node(same, blocks, set_parameters)
    by_itself, packed = driver.function("cuLaunchKernel"), ctypes.addressof(pointers)

    def launch(stream: int) -> None:
        (status,) = by_itself(found.func, *shape, stream, packed, 0)
        if status:
            raise driver.refused("cuLaunchKernel", status)

    return Node(same, blocks, set_parameters, launch, int(handle), after)


def _followed(handle: Any) -> tuple[int, ...] | None:
    """The nodes that a kernel follows, two at most; None if a plain launch is not all that its node says: of clusters,
    of kernels that are on the device together, of those that begin before what they follow has ended."""
    from cuda.bindings import driver as names

    kinds = names.CUlaunchAttributeID
    try:
        cluster = driver.call("cuGraphKernelNodeGetAttribute", handle, kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        together = driver.call("cuGraphKernelNodeGetAttribute", handle, kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        found, *_ = driver.results("cuGraphNodeGetDependencies", handle, 2)
    except DeviceError:  # so it is told of an edge that says more than that
        return None
    if together.cooperative or max(cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z) > 1:
        return None
    return tuple(int(each) for each in found if int(each))


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
    blocks = [memoryview(bytearray(place.to_bytes(8, "little"))) for place in places]
    context = driver.call("cuCtxGetCurrent")

    def set_parameters(executable: Any) -> None:
        found.dstDevice, found.srcDevice = (int.from_bytes(block, "little") for block in blocks)
        driver.call("cuGraphExecMemcpyNodeSetParams", executable, handle, found, context)

    return Node(same, blocks, set_parameters)


def _fill(handle: Any) -> Node:
    found = driver.call("cuGraphMemsetNodeGetParams", handle)
    return Node(("MEMSET", *(int(getattr(found, name)) for name in _FILL)))


_READ = {"KERNEL": _kernel, "MEMCPY": _copy, "MEMSET": _fill}
