# SPDX-License-Identifier: MIT
"""Memory operations of streams that need no SM: copies, waits for a word, writes of a word.

A grid whose programs wait for a queue may hold every SM, so the queue's operations must not need one. Streams wait for
words and write them by themselves, and the copy engines copy to and from a peer's memory, also rows with a pitch.
(PyTorch copies rows with a pitch by a kernel, and the driver copies within one device's memory by a kernel, with any
API: cuMemcpyAsync, cuMemcpyPeerAsync and batches that prefer to overlap with kernels were tried.)

Order, by the CUDA driver API (Stream Memory Operations; `CUstreamWriteValue_flags`): a write is preceded by a fence
like `__threadfence_system()` for all earlier work of the stream, unless CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER is set;
work after a wait starts when its condition holds. Captured, both are nodes of a graph, with their values at the
capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilescale.backends.cuda.running import driver

MOST_OPERATIONS = 255
"""Of a batch (CUDA driver API, cuStreamBatchMemOp)."""

_AT_LEAST, _EQUAL = 0, 1
"""CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2^bits, and CU_STREAM_WAIT_VALUE_EQ."""

_CONDITIONS = {">=": (_AT_LEAST, 0), ">": (_AT_LEAST, 1), "==": (_EQUAL, 0)}


@dataclass(frozen=True)
class Word:
    """An integer in memory that a device reaches.

    Attributes:
        address: its address.
        nbytes: 4 or 8.
    """

    address: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, index: Sequence[int]) -> Word:
        """An element of a tensor."""
        size = tensor.element_size()
        return cls(tensor.data_ptr() + size * sum(i * n for i, n in zip(index, tensor.stride(), strict=True)), size)


@dataclass(frozen=True)
class WaitCondition:
    """The condition of a stream's wait: `word compare value`, with `compare` one of ">=", ">", "=="."""

    word: Word
    compare: str
    value: int

    @property
    def enough(self) -> int:
        """A value that satisfies the condition."""
        return self.value + _CONDITIONS[self.compare][1]


@dataclass(frozen=True)
class WordWrite:
    """A write of a number to a word, released: a reader of the number sees all earlier work of the stream."""

    word: Word
    value: int


def write(stream: torch.cuda.Stream, word: Word, value: int) -> None:
    """Add a write to a stream. Raises DeviceError."""
    add(stream, WordWrite(word, value))


def add(stream: torch.cuda.Stream, *operations: WordWrite | WaitCondition) -> None:
    """Add writes, and waits for conditions, to a stream; a batch takes little longer than one operation.

    Work added after a wait starts when its condition holds. Raises DeviceError: an error of the driver.
    """
    for first in range(0, len(operations), MOST_OPERATIONS):
        batch = [_parameters(each) for each in operations[first : first + MOST_OPERATIONS]]
        driver.call("cuStreamBatchMemOp", stream.cuda_stream, len(batch), batch, 0)


def _parameters(operation: WordWrite | WaitCondition) -> Any:
    """The driver's parameters, a union of records."""
    from cuda.bindings import driver as names

    made, bits = names.CUstreamBatchMemOpParams(), 8 * operation.word.nbytes
    if isinstance(operation, WaitCondition):
        name, record, number = "WAIT", made.waitValue, operation.enough
        flags = _CONDITIONS[operation.compare][0]
    else:
        name, record, number, flags = "WRITE", made.writeValue, operation.value, 0
    made.operation = getattr(names.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{name}_VALUE_{bits}")
    record.address, record.flags = operation.word.address, flags
    setattr(record, "value64" if bits == 64 else "value", number % (1 << bits))
    return made


@dataclass(frozen=True)
class StridedRows:
    """A copy of `height` rows of `width` bytes each: addresses, and bytes from a row to the next."""

    target: int
    source: int
    width: int
    height: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


def rows(target: torch.Tensor, source: torch.Tensor) -> list[StridedRows]:
    """The copies of `source` to `target`, both of one type and shape."""
    size = width = target.element_size()
    outer: list[tuple[int, int, int]] = []
    dims = zip(target.shape, target.stride(), source.stride(), strict=True)
    for count, to, at in reversed([(n, to * size, at * size) for n, to, at in dims if n != 1]):
        inner = outer[-1] if outer else None
        if inner is None and to == at == width:
            width *= count
        elif inner is not None and (to, at) == (inner[0] * inner[1], inner[0] * inner[2]):
            outer[-1] = (inner[0] * count, inner[1], inner[2])
        else:
            outer.append((count, to, at))
    if width == 0 or any(count == 0 for count, _, _ in outer):
        return []
    height, to_pitch, at_pitch = outer.pop(0) if outer else (1, 0, 0)
    places = [(target.data_ptr(), source.data_ptr())]
    for count, to, at in outer:
        places = [(a + i * to, b + i * at) for i in range(count) for a, b in places]
    return [StridedRows(a, b, width, height, to_pitch, at_pitch) for a, b in places]


def copy(stream: torch.cuda.Stream, part: StridedRows) -> None:
    """Add a copy to a stream. Raises DeviceError."""
    if part.height == 1:
        driver.call("cuMemcpyAsync", part.target, part.source, part.width, stream.cuda_stream)
        return
    from cuda.bindings import driver as names

    shape = names.CUDA_MEMCPY2D()
    shape.srcMemoryType = shape.dstMemoryType = names.CUmemorytype.CU_MEMORYTYPE_UNIFIED  # a device's or the host's
    shape.srcDevice, shape.srcPitch = part.source, part.source_pitch
    shape.dstDevice, shape.dstPitch = part.target, part.target_pitch
    shape.WidthInBytes, shape.Height = part.width, part.height
    driver.call("cuMemcpy2DAsync", shape, stream.cuda_stream)


def by_host(part: StridedRows, memory: int) -> list[StridedRows]:
    """The copies within one device's memory by copy engines: through host memory, by address."""
    there = replace(part, target=memory, target_pitch=part.width)
    return [there, replace(part, source=memory, source_pitch=part.width)]
