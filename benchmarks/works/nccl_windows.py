# SPDX-License-Identifier: MIT
"""NCCL with memory registered as windows of all ranks, for its symmetric kernels and its copy-engine collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import trials


class Windows(NamedTuple):
    """A group of all ranks, and a pool whose memory is registered with it."""

    group: dist.ProcessGroup
    pool: torch.cuda.MemPool

    def tensors(self, *lengths: int) -> list[torch.Tensor]:
        """Uninitialized registered tensors of bfloat16; collective."""
        with torch.cuda.use_mem_pool(self.pool):
            return [torch.empty(length, dtype=torch.bfloat16, device=trials.device()) for length in lengths]


@functools.cache
def windows(copies: bool) -> Windows:
    """The group; with `copies` it moves data by copy engines where NCCL has such an algorithm. Collective."""
    options = dist.ProcessGroupNCCL.Options()
    if copies:
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(backend="nccl", pg_options=options, device_id=trials.device())
    dist.all_reduce(torch.zeros(1, device=trials.device()), group=group)  # the communicator exists before the windows
    backend = group._get_backend(trials.device())
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool, symm=True)
    return Windows(group, pool)


def aside(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call on a stream of its own: the default one takes none of the batches of copies that NCCL enqueues."""
    stream = torch.cuda.Stream()

    def run() -> Any:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made = call()
        torch.cuda.current_stream().wait_stream(stream)
        return made

    return run
