# SPDX-License-Identifier: MIT
"""What others offer for the same work: cuBLAS and NCCL as PyTorch calls them, and its kernels on symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tilescale.tuning.race import Runner


def library_product(shape: tuple[int, int, int]) -> Runner:
    """A product of random matrices on this GPU, by cuBLAS."""
    m, n, k = shape
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return Runner(lambda: torch.mm(a, b, out=out))


def library_collective(operation: str, n: int) -> Runner:
    """A collective by NCCL; `n` elements in all: the result of a gather, a rank's own elsewhere.

    Raises:
        RuntimeError: ranks that share GPUs have no NCCL.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no NCCL where ranks share GPUs")
    whole = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    other = torch.zeros_like(whole)
    part = whole[: n // dist.get_world_size()]
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, other),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    return Runner(calls[operation])


def symmetric_all_reduce(n: int, shots: str) -> Runner:
    """PyTorch's all-reduce on symmetric memory, "one" or "two" shots."""
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(n, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device())).zero_()
    symm.rendezvous(x, dist.group.WORLD)
    group = dist.group.WORLD.group_name
    kernels = {"one": torch.ops.symm_mem.one_shot_all_reduce, "two": torch.ops.symm_mem.two_shot_all_reduce_}
    return Runner(lambda: kernels[shots](x, "sum", group))
