# SPDX-License-Identifier: MIT
"""The open heaps of this process: the heap of a tensor, and their end when the process exits."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import TYPE_CHECKING

from tilescale.errors import NotSymmetricError, TileScaleError

if TYPE_CHECKING:
    import torch

    from tilescale.comm.heap.heap import SymmetricHeap

_open: list[SymmetricHeap] = []
_exit_registered_by: int | None = None


def add(heap: SymmetricHeap) -> None:
    """Note that a heap was opened. It stays open until it is closed: its tensors may outlive all references to it."""
    global _exit_registered_by
    _open.append(heap)
    if _exit_registered_by is None:
        _exit_registered_by = os.getpid()
        atexit.register(_leave)


def remove(heap: SymmetricHeap) -> None:
    """Note that a heap is closed."""
    _open.remove(heap)


def _leave() -> None:
    """Close heaps that the end of the process would not free properly. Later exit handlers may read the rest."""
    if os.getpid() == _exit_registered_by:  # a forked child has none of the device's state
        _end([heap for heap in _open if not heap.freed_at_exit])


def _end(heaps: list[SymmetricHeap]) -> None:
    """Close heaps, the latest first."""
    for heap in reversed(heaps.copy()):
        with contextlib.suppress(TileScaleError):  # the error has been reported before
            heap.end()


def heap_of(*tensors: torch.Tensor) -> SymmetricHeap:
    """The heap of all these tensors. Raises NotSymmetricError if one is in none, or two in two."""
    homes = [_home(tensor) for tensor in tensors]
    for tensor, home in zip(tensors, homes, strict=True):
        if home is None or home is not homes[0]:
            raise not_symmetric(tensor, homes[0])
    if not homes or homes[0] is None:
        raise NotSymmetricError("no tensors, so no heap")
    return homes[0]


def is_symmetric(tensor: torch.Tensor) -> bool:
    return _home(tensor) is not None


def not_symmetric(tensor: torch.Tensor, wanted: SymmetricHeap | None) -> NotSymmetricError:
    """The error for a tensor that is not in the wanted heap, or in any."""
    what = f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
    home = _home(tensor)
    if home is not None:
        return NotSymmetricError(
            f"{what} lies in {home}, not in {wanted}", hint="take all tensors of one call from the same heap"
        )
    return NotSymmetricError(
        f"{what} is not symmetric: peers cannot reach it",
        hint="allocate it with tilescale.empty or zeros, or copy it with tilescale.from_tensor",
    )


def _home(tensor: torch.Tensor) -> SymmetricHeap | None:
    return next((heap for heap in _open if heap.is_symmetric(tensor)), None)
