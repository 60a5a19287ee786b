# SPDX-License-Identifier: MIT
"""Gathers one layer ahead on GPUs: `torchrun --nproc-per-node N tests/gpu/prefetch_check.py [names]`.

The overlapped program must leave the same bits as the sequential one, with ranks out of step and workspaces of earlier
calls in place. Then both are timed alternately. Prints PASS or FAIL for each program and rank, and times.
"""

import random
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tests.overlap.support import overlapped  # noqa: E402
from tests.overlap.test_prefetch import COLUMNS, layers, products  # noqa: E402

LIMIT_S = 140.0
WAIT_S = 2.0
CALLS, ROUNDS = 12, 10


def held(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Symmetric tensors with these values."""
    made = [tilescale.zeros(tuple(tensor.shape), dtype=tensor.dtype) for tensor in tensors]
    for mine, given in zip(made, tensors, strict=True):
        mine.copy_(given)
    return made


def agrees(count: int, rows: int) -> None:
    """Small layers, whose sends overtake the grids."""
    world, delays = tilescale.init(), random.Random(tilescale.init().rank)
    func = layers(world.size, count, rows)
    kernels = [
        tilescale.compile(func, schedule=schedule, wait_s=WAIT_S) for schedule in ("sequential", overlapped(func)[1])
    ]
    assert "ahead" in kernels[1].schedule
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(100 * call + world.rank)
        total = world.size * rows
        zeros = torch.zeros(total, COLUMNS)
        given = torch.randn(count * rows, COLUMNS, generator=generator), zeros, zeros
        results = []
        for kernel in kernels:
            args = held(*given)
            torch.cuda.synchronize()
            world.barrier()
            torch.cuda._sleep(delays.randrange(400_000))
            kernel(*args)
            kernel.synchronize()
            results.append(args[1].clone())
        assert torch.equal(*results), f"call {call}: {int((results[0] != results[1]).sum())} elements differ"


def times(size: int, count: int) -> None:
    """Layers of GEMMs, one after the other."""
    world = tilescale.init()
    func = products(world.size, size, count)
    kernels = {
        "in order": tilescale.compile(func, schedule="sequential"),
        "ahead": tilescale.compile(func, schedule=overlapped(func)[1]),
    }
    w = torch.randn(count * size // world.size, size).mul_(size**-0.5).to(torch.bfloat16)
    args = held(w, torch.randn(2, size, size).to(torch.bfloat16))
    found: dict[str, list[float]] = {name: [] for name in kernels}
    for turn in range(ROUNDS + 2):
        for name, kernel in kernels.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            world.barrier()
            begin.record()
            kernel(*args)
            end.record()
            end.synchronize()
            if turn > 1:
                found[name].append(begin.elapsed_time(end) * 1e3)
    medians = {name: max(world.all_gather(statistics.median(us))) for name, us in found.items()}
    if world.rank == 0:
        print(f"TIME {count} layers of {size}: {medians}, {medians['ahead'] / medians['in order']:.3f} x", flush=True)


if __name__ == "__main__":
    shapes = (2, 8), (7, 24)
    checks = [(f"layers_{count}_{rows}", lambda count=count, rows=rows: agrees(count, rows)) for count, rows in shapes]
    checks += [(f"times_{size}", lambda size=size: times(size, 8)) for size in (2048, 4096)]
    named_checks.run(checks, LIMIT_S)
