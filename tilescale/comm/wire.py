# SPDX-License-Identifier: MIT
"""Objects as byte buffers: pickle protocol 5, where the data of arrays and CPU tensors stays outside the pickle.

A tensor arrives contiguous and detached. Tensors in lists, tuples and dictionaries whose memory overlaps arrive as
views of one memory again: writes to one are visible in the others, as at the sender.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LARGEST = 16  # bytes of an element
_SMALL = 64 * 1024  # below this, one more copy costs less than one more message


def encode(obj: Any) -> list[memoryview]:
    """`obj` as a pickle followed by the large buffers it refers to; the buffers are not copied."""
    buffers: list[memoryview] = []

    def keep_outside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _SMALL:
            return True
        buffers.append(view)
        return False

    head = io.BytesIO()
    pickler = _Pickler(head, protocol=5, buffer_callback=keep_outside)
    pickler.shared = _shared(obj)
    pickler.dump(obj)
    return [head.getbuffer(), *buffers]


def decode(parts: Sequence[bytearray]) -> Any:
    """The object that `encode` turned into `parts`. Arrays and tensors own the memory of their part."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    shared: dict[int, _Memory]

    def reducer_override(self, obj: Any) -> Any:
        if not _is_plain_tensor(obj):
            return NotImplemented
        memory = self.shared.get(id(obj))
        if memory is not None:
            offset = obj.data_ptr() - memory.begin
            return _view, (memory, obj.dtype, tuple(obj.shape), obj.stride(), offset)
        import torch

        plain = obj.detach().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8)
        return _tensor, (_bytes(data), obj.dtype, tuple(obj.shape))


def _is_plain_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")  # without torch in the process there are no tensors either
    if torch is None or type(obj) is not torch.Tensor:
        return False
    return obj.device.type == "cpu" and obj.layout == torch.strided and not obj.is_quantized


def _tensor(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if memoryview(data).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


# -- tensors that share memory ----------------------------------------------------------------------------------------


class _Memory:
    """Bytes from address `begin` to `end` of one storage, which several tensors share."""

    def __init__(self, tensor: torch.Tensor, begin: int, end: int):
        self.tensor, self.begin, self.end = tensor, begin, end

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        storage = self.tensor.untyped_storage()
        first = self.begin - storage.data_ptr()
        data = torch.empty(0, dtype=torch.uint8).set_(storage)[first : first + self.end - self.begin]
        return _tensor, (_bytes(data), torch.uint8, tuple(data.shape))


def _bytes(data: Any) -> pickle.PickleBuffer:
    """The memory of a uint8 tensor. `Tensor.numpy` would keep its storage from being resized, as FSDP does, forever."""
    import numpy as np

    return pickle.PickleBuffer(np.from_dlpack(data).data)


def _view(memory: torch.Tensor, dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset // dtype.itemsize, shape, stride)


def _shared(obj: Any) -> dict[int, _Memory]:
    """The id of each tensor in `obj` that overlaps another one -> their common memory."""
    found: dict[int, list[tuple[int, int, Any]]] = {}
    for tensor in {id(tensor): tensor for tensor in _tensors(obj)}.values():
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            home, begin = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            end = begin + (last + 1) * tensor.element_size()
            found.setdefault(home, []).append((begin - (begin - home) % _LARGEST, end, tensor))
    return {number: memory for spans in found.values() if len(spans) > 1 for number, memory in _joined(spans)}


def _joined(spans: list[tuple[int, int, Any]]) -> Iterator[tuple[int, _Memory]]:
    spans = sorted(spans, key=lambda span: span[:2])
    while spans:
        begin, end, tensor = spans[0]
        together = 1
        while together < len(spans) and spans[together][0] < end:
            end = max(end, spans[together][1])
            together += 1
        if together > 1:
            memory = _Memory(tensor, begin, end)
            yield from ((id(one), memory) for _, _, one in spans[:together])
        spans = spans[together:]


def _tensors(obj: Any) -> Iterator[torch.Tensor]:
    if _is_plain_tensor(obj):
        yield obj
    elif type(obj) is dict:
        for value in obj.values():
            yield from _tensors(value)
    elif type(obj) in (list, tuple):
        for value in obj:
            yield from _tensors(value)
