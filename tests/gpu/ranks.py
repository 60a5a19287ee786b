# SPDX-License-Identifier: MIT
"""The ranks of a check, and their reference collectives: by NCCL, or by gloo where ranks share GPUs, as NCCL needs a
GPU for each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tilescale
from tilescale.settings import settings

WORLD = tilescale.init()
RANK, SIZE, DEVICE = WORLD.rank, WORLD.size, WORLD.device
SHARED = settings().share_gpus
"""Whether ranks are time-sliced on GPUs: then times are meaningless."""

torch.cuda.set_device(DEVICE)


def join() -> None:
    """Make PyTorch's group of all ranks, where there is none."""
    if dist.is_initialized():
        return
    if SHARED:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=DEVICE)


def say(*what: Any) -> None:
    """Print by the first rank."""
    if RANK == 0:
        print(*what, flush=True)


def barrier() -> None:
    """All ranks' devices have done what they were given."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def everyones(x: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, (ranks, ...)."""
    mine = _bytes(x)
    every = torch.empty(SIZE, len(mine), dtype=torch.uint8, device=mine.device)
    dist.all_gather(list(every), mine)
    return every.to(DEVICE).view(-1).view(x.dtype).view(SIZE, *x.shape)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in float32."""
    summed = x.to("cpu" if SHARED else DEVICE, torch.float32, copy=True)
    dist.all_reduce(summed)
    return summed.to(DEVICE)


def as_first(x: torch.Tensor) -> torch.Tensor:
    """The first rank's tensor of this kind."""
    whole = _bytes(x)
    dist.broadcast(whole, 0)
    return whole.to(DEVICE).view(x.dtype).view(x.shape)


def slowest(time: float) -> float:
    """The longest of all ranks' times."""
    return max(WORLD.all_gather(time))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in the memory from which the group sends: NCCL and gloo support different types."""
    return x.to("cpu" if SHARED else DEVICE, copy=True).contiguous().view(-1).view(torch.uint8)
