# SPDX-License-Identifier: MIT
"""Tensors at addresses stored in memory: `T.make_tensor(table[i], shape, dtype)` with a table of `data_ptr()`.

A GPU dereferences any address. In the emulator the address, and the whole tensor at it, must lie in a tensor of this
process.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tilescale.errors import OutOfBoundsError


class HostMemory:
    """The memory of the tensors that this process has on the CPU."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[np.ndarray, Any]] = {}  # address -> its bytes, and what keeps them alive

    def at(self, address: int) -> np.ndarray:
        """The bytes from an address to the end of its tensor's memory. Raises OutOfBoundsError: no tensor is there."""
        found = self._behind(address)
        if found is None:
            for begin, size, owner in _memories():
                if begin not in self._found:
                    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
                    self._found[begin] = memory, owner
            found = self._behind(address)
        if found is None:
            raise OutOfBoundsError(
                f"there is no tensor at the address {address:#x}",
                hint="fill the table with data_ptr() of tensors on the CPU, and keep these",
            )
        return found

    def clear(self) -> None:
        """Let go of all tensors."""
        self._found.clear()

    def _behind(self, address: int) -> np.ndarray | None:
        for begin, (memory, _) in self._found.items():
            if begin <= address < begin + memory.size:
                return memory[address - begin :]
        return None


def _memories() -> Iterator[tuple[int, int, Any]]:
    """Address, size in bytes and owner of each tensor's memory. Only Python's garbage collector knows all of them."""
    for candidate in gc.get_objects():
        if type(candidate) in (torch.Tensor, torch.nn.Parameter) and candidate.device.type == "cpu":
            if candidate.layout == torch.strided and candidate.untyped_storage().nbytes():
                storage = candidate.untyped_storage()
                yield storage.data_ptr(), storage.nbytes(), storage


def placed(memory: np.ndarray, name: str, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """A tensor at the begin of some bytes. Strides are in elements. Raises OutOfBoundsError: the tensor is larger than
    the memory."""
    need = dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
    if 0 not in shape and need > memory.size:
        raise OutOfBoundsError(
            f"{name} of shape {tuple(shape)} takes {need} bytes, its tensor has {memory.size} from there on",
            hint="make it as large as the tensor whose address it is",
        )
    return np.ndarray(shape, dtype, memory, 0, [step * dtype.itemsize for step in strides])
