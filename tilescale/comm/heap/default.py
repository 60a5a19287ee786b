# SPDX-License-Identifier: MIT
"""The heap that `tilescale.empty`, `zeros` and `from_tensor` allocate from: all ranks of the job, one device each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilescale.comm.heap.heap import SymmetricHeap
from tilescale.comm.world import World, init
from tilescale.errors import UsageError
from tilescale.settings import settings

if TYPE_CHECKING:
    import torch

__all__ = ["default_heap", "empty", "from_tensor", "zeros"]

_heap: SymmetricHeap | None = None


def default_heap() -> SymmetricHeap:
    """The heap of the world, opened collectively at the first call, which also joins the job if nobody has.

    Its device is the GPU with this rank's number on its node; the CPU if there is no GPU or TILESCALE_EMULATE is set.

    Raises:
        UsageError: a node has more ranks than GPUs, or TILESCALE_HEAP names no provider.
        RankMismatchError: ranks with different kinds of device or provider.
        DependencyError: a package of the wanted provider is missing.
        DeviceError: the GPU, its driver or the operating system refuses what the wanted provider needs.
        UnsupportedError: no provider works with these devices.
        LaunchError: the ranks do not find each other.
    """
    global _heap
    if _heap is None or not _heap.is_open:
        world = init()
        _heap = SymmetricHeap(world, _device(world))
    return _heap


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Collective: a symmetric tensor with arbitrary contents, of `default_heap`. See `SymmetricHeap.empty`.

    Raises HeapExhaustedError, RankMismatchError, ShapeError or UsageError, and what `default_heap` raises.
    """
    return default_heap().empty(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Collective: a symmetric tensor of zeros, of `default_heap`. See `SymmetricHeap.zeros`.

    Raises HeapExhaustedError, RankMismatchError, ShapeError or UsageError, and what `default_heap` raises.
    """
    return default_heap().zeros(shape, dtype)


def from_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: a symmetric copy of `tensor`, in `default_heap`. See `SymmetricHeap.from_tensor`.

    Raises HeapExhaustedError, RankMismatchError or UsageError, and what `default_heap` raises.
    """
    return default_heap().from_tensor(tensor)


def _device(world: World) -> torch.device:
    import torch

    if settings().emulate or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        raise UsageError(
            f"rank {world.rank} is number {world.local_rank} on its node, which shows {count} GPUs",
            hint="start as many ranks on a node as it has GPUs; CUDA_VISIBLE_DEVICES limits what a rank sees",
        )
    return torch.device("cuda", world.local_rank)
