# SPDX-License-Identifier: MIT
"""Ordinary torch tensors over memory that PyTorch did not allocate, and a call when the last of them is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilescale.comm.heap.address_map import AddressMap

if TYPE_CHECKING:
    import torch


def tensor_at(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    on_release: Callable[..., object],
    *held: Any,
) -> torch.Tensor:
    """A tensor over the memory at `address`.

    Its storage is one that PyTorch shares among all views, autograd and C++ code, so the memory is in use exactly as
    long as the storage lives. Then `on_release(*held)` runs, in the thread that released it; until then `held` lives.
    """
    import torch

    nbytes = extent(shape, strides) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(shape), tuple(strides))
    finalizer = weakref.finalize(tensor.untyped_storage(), on_release, *held)
    finalizer.atexit = False  # at exit the heap itself is closed
    return tensor


def instances_of(tensor: torch.Tensor, offset: int, view: AddressMap) -> torch.Tensor:
    """The instances of a tensor at an offset in the heaps of all ranks of a map: its shape after a dimension of these.

    When it is released, this rank's instance, which it keeps alive until then, lives on.
    """
    return tensor_at(
        view.base + offset,
        (view.ranks, *tensor.shape),
        (view.stride // tensor.dtype.itemsize, *tensor.stride()),
        tensor.dtype,
        tensor.device,
        lambda _: None,
        tensor.untyped_storage(),
    )


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides
