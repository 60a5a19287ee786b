# SPDX-License-Identifier: MIT
"""Graphs of operators whose results depend on the rank and on the number of ranks, as PyTorch keeps them on disk."""

from collections.abc import Callable

import torch

import tilescale
from tilescale import ops

WORLD = tilescale.init()

CALLS: list[Callable[[torch.Tensor], torch.Tensor]] = [ops.all_gather, ops.gather, ops.scatter, ops.broadcast]

if __name__ == "__main__":
    for call in CALLS:
        results = []
        for run in (call, torch.compile(call, fullgraph=True)):
            x = torch.arange(12.0).view(6, 2).add(WORLD.rank).requires_grad_()
            y = 2 * run(x)
            y.sum().backward()
            results.append((y.detach(), x.grad))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), (call.__name__, one, other)
    print("passed", WORLD.rank, flush=True)
