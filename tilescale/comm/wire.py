# SPDX-License-Identifier: MIT
"""Objects as byte buffers: pickle protocol 5, where the data of arrays and CPU tensors stays outside the pickle.

A tensor arrives contiguous and detached; views of one storage arrive as separate tensors.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["decode", "encode"]

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
    _Pickler(head, protocol=5, buffer_callback=keep_outside).dump(obj)
    return [head.getbuffer(), *buffers]


def decode(parts: Sequence[bytearray]) -> Any:
    """The object that `encode` turned into `parts`. Arrays and tensors own the memory of their part."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # without torch in the process there are no tensors either
        if torch is None or type(obj) is not torch.Tensor:
            return NotImplemented
        if obj.device.type != "cpu" or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        plain = obj.detach().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape))


def _tensor(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if memoryview(data).nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
