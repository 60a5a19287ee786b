# SPDX-License-Identifier: MIT
"""Layers that a plan makes, without a warm-up: `torchrun --nproc-per-node 2 tests/gpu/layers_check.py [name]`.

Their kernels begin to compile when they are made, and first calls wait for them. Results and gradients of steps with
few and many rows are compared with one GPU's. With an empty TILELANG_CACHE_DIR all kernels are compiled; with that of
an earlier run nothing is.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import main, near, random, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, barrier  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.runtime import early  # noqa: E402

FEATURES, INNER = 1152, 2176
"""Sizes that no other check has: their kernels are in no cache."""


class Block(nn.Module):
    """Two layers with one input, and one of their product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(FEATURES, SIZE * INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(SIZE * INNER, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def plan(sequence: bool) -> dict[str, Any]:
    """Of the block; `sequence`: tokens are split over the ranks around it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    outside = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {name: ColwiseParallel() for name in ("gate", "up")}
    found["down"] = RowwiseParallel(output_layouts=outside)
    if sequence:
        found[""] = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate(), use_local_output=False)
    return found


def check_tokens_over_ranks(_: slice) -> None:
    check(sequence=True)


def check_tokens_on_all_ranks(_: slice) -> None:
    check(sequence=False)


def check(sequence: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    whole = Block().to(DEVICE, torch.bfloat16)
    mesh = init_device_mesh("cuda", (SIZE,))
    begin = time.monotonic()
    made = ops.parallelize_module(copy.deepcopy(whole), mesh, plan(sequence), src_data_rank=None)
    say(f"layers made in {time.monotonic() - begin:.1f} s, {len(early._begun.runs)} kernels begun here")
    barrier()
    begin = time.monotonic()
    for rows in (2048, 24, 600, 2048):
        compare_step(made, whole, rows, sequence)
        say(f"PASS {'over ranks' if sequence else 'on all'}, {rows} rows, at {time.monotonic() - begin:.1f} s")


def compare_step(made: nn.Module, whole: nn.Module, rows: int, sequence: bool) -> None:
    """Results and gradients of both, for the same tokens."""
    torch.manual_seed(rows)
    tokens = random(1, SIZE * rows, FEATURES)
    x = tokens.chunk(SIZE, 1)[RANK].clone() if sequence else tokens.clone()
    want = whole(tokens)
    want.square().sum().backward()
    if RANK == 1:
        torch.cuda._sleep(2_000_000)
    result = made(x)
    result.square().sum().backward()
    own = want.chunk(SIZE, 1)[RANK] if sequence else want
    near(f"{rows} rows", result.detach(), own.detach())
    for (name, part), other in zip(made.named_parameters(), whole.parameters(), strict=True):
        grad = other.grad.chunk(SIZE, 1 if name.startswith("down") else 0)[RANK]
        near(f"{rows} rows, {name}", part.grad.to_local(), grad)
        part.grad = other.grad = None


if __name__ == "__main__":
    main({name: function for name, function in globals().items() if name.startswith("check_")})
