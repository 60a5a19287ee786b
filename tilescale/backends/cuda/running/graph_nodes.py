# SPDX-License-Identifier: MIT
"""Nodes of captured CUDA graphs as bytes: arguments of kernels, copies and fills, read and updated.

Arguments of the kernels and one-dimensional copies of an instantiated graph can be updated; an enqueued replay keeps
its arguments (CUDA driver API, cuGraphExecKernelNodeSetParams, cuGraphExecMemcpyNodeSetParams). Those of copies of
several rows cannot, by cuGraphExecUpdate neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilescale.backends.cuda.running import driver

_LAUNCH = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")

_FILL = ("pitch", "value", "elementSize", "width", "height")

_COPY = (
    *("WidthInBytes", "Height", "Depth", "srcMemoryType", "dstMemoryType", "srcXInBytes", "srcY", "srcZ", "srcLOD"),
    *("dstXInBytes", "dstY", "dstZ", "dstLOD", "srcPitch", "srcHeight", "dstPitch", "dstHeight"),
)

_SOURCE, _TARGET = 48, 136
"""Offsets of a copy's addresses in CUDA_MEMCPY3D."""

_PACKED, _PACKED_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE: what follows them in a launch's `extra`."""

_WITHOUT_TENSORS = ("EMPTY", "EVENT_RECORD", "WAIT_EVENT", "BATCH_MEM_OP")
"""Kinds of nodes without tensors of a call: flags that streams wait for and write do not move."""


ParameterBytes = ctypes.Array
"""Writable bytes, with an address."""


@dataclass(frozen=True)
class CapturedNode:
    """A node of a captured graph.

    Attributes:
        same: the fixed properties, equal for interchangeable nodes.
        blocks: the bytes of each parameter that may differ; an update of an instantiated graph's node passes them.
        handle: the driver's handle of the node.
        parameters: the address of the driver's structure of them.
        context: the context of a copy; 0 for a kernel.
        kept: objects that must live as long as the node.
        is_constant: whether the driver does not update the node.
    """

    same: tuple[Any, ...]
    blocks: Sequence[ParameterBytes] = ()
    handle: int = 0
    parameters: int = 0
    context: int = 0
    kept: Any = None
    is_constant: bool = False


def nodes_of(graph: int) -> list[CapturedNode]:
    """The nodes of a captured graph, in capture order."""
    from cuda.bindings import driver as names

    found = names.CUgraph(graph)
    _, count = driver.results("cuGraphGetNodes", found)  # the bindings make an object for each node of the limit
    handles, _ = driver.results("cuGraphGetNodes", found, count)
    return list(map(_node, handles))


def _node(handle: Any) -> CapturedNode:
    kind = driver.call("cuGraphNodeGetType", handle).name.removeprefix("CU_GRAPH_NODE_TYPE_")
    if kind in _READ:
        return _READ[kind](handle)
    return CapturedNode((kind,)) if kind in _WITHOUT_TENSORS else _unknown(kind)


def _unknown(kind: str) -> CapturedNode:
    return CapturedNode((kind, object()))


def _kernel(handle: Any) -> CapturedNode:
    found = driver.call("cuGraphKernelNodeGetParams", handle)
    if found.extra:
        return _packed_kernel(handle, found)
    sizes = _parameter_sizes(found.func)
    if sizes is None or not found.kernelParams:
        return _unknown("KERNEL")
    given = (ctypes.c_void_p * len(sizes)).from_address(int(found.kernelParams))
    own = [ctypes.create_string_buffer(ctypes.string_at(at, n), n) for at, n in zip(given, sizes, strict=True)]
    pointers = (ctypes.c_void_p * len(own))(*map(ctypes.addressof, own))
    found.kernelParams = ctypes.addressof(pointers)
    return CapturedNode(_fixed(found), own, int(handle), found.getPtr(), kept=(found, pointers))


def _packed_kernel(handle: Any, found: Any) -> CapturedNode:
    """A kernel whose parameters are one buffer, as cuBLAS launches its own."""
    words = (ctypes.c_uint64 * 4).from_address(int(found.extra))
    given = dict(zip(words[::2], words[1::2], strict=True))
    size = ctypes.c_size_t(ctypes.c_size_t.from_address(given[_PACKED_SIZE]).value)
    own = ctypes.create_string_buffer(ctypes.string_at(given[_PACKED], size.value), size.value)
    passed = (ctypes.c_uint64 * 5)(_PACKED, ctypes.addressof(own), _PACKED_SIZE, ctypes.addressof(size), 0)
    found.extra = ctypes.addressof(passed)
    return CapturedNode(_fixed(found), [own], int(handle), found.getPtr(), kept=(found, passed, size))


def _fixed(found: Any) -> tuple[Any, ...]:
    return ("KERNEL", int(found.func), *(int(getattr(found, name)) for name in _LAUNCH))


_sizes: dict[int, list[int] | None] = {}


def _parameter_sizes(function: Any) -> list[int] | None:
    """Bytes of each parameter of a kernel; None if the driver does not report them."""
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


def _copy(handle: Any) -> CapturedNode:
    found = driver.call("cuGraphMemcpyNodeGetParams", handle)
    same = ("MEMCPY", *(int(getattr(found, name)) for name in _COPY))
    first = found.getPtr()
    blocks = [(ctypes.c_char * 8).from_address(first + at) for at in (_TARGET, _SOURCE)]
    context, is_constant = int(driver.call("cuCtxGetCurrent")), found.Height > 1 or found.Depth > 1
    return CapturedNode(same, blocks, int(handle), first, context, found, is_constant)


def _fill(handle: Any) -> CapturedNode:
    found = driver.call("cuGraphMemsetNodeGetParams", handle)
    target = ctypes.create_string_buffer(int(found.dst).to_bytes(8, "little"), 8)
    return CapturedNode(("MEMSET", *(int(getattr(found, name)) for name in _FILL)), [target], is_constant=True)


_READ = {"KERNEL": _kernel, "MEMCPY": _copy, "MEMSET": _fill}
