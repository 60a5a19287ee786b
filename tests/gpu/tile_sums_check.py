# SPDX-License-Identifier: MIT
"""Collectives of tiles in persistent grids, on GPUs: `torchrun --nproc-per-node 2 tests/gpu/tile_sums_check.py`.

Blocks of a persistent GEMM combine each tile with those of the other ranks, while they multiply the next one. Inputs
are small whole numbers, so that sums are exact in any order: every bit is compared, in repeated calls and replays of a
graph, on fresh inputs, with ranks out of step and outputs poisoned. Exit code 1 if a check fails.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.cuda.turn_programs import PROGRAMS, TURNS, expected, rows_of_result  # noqa: E402
from tests.gpu.ranks import DEVICE, SHARED, WORLD, everyones, join  # noqa: E402

CALLS, REPLAYS = 6, 20
SKEW_CYCLES = 1_000_000
WAIT_S = 60.0 if SHARED else 3.0


def inputs(shape: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of this rank."""
    m, n, k = shape
    generator = torch.Generator(DEVICE).manual_seed(1000 * seed + WORLD.rank)
    make = lambda *size: torch.randint(-1, 2, size, generator=generator, device=DEVICE).bfloat16()  # noqa: E731
    return make(m, k), make(n, k)


def reference(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Expected result of this rank."""
    parts = everyones(a.float() @ b.float().T)
    return expected(name, list(parts), WORLD.rank).bfloat16()


def check(name: str, shape: tuple[int, int, int], blocks: int) -> list[str]:
    kernel = tilescale.compile(PROGRAMS[name](WORLD.size, shape, blocks), wait_s=WAIT_S)
    a, b = (torch.empty_like(x) for x in inputs(shape, 0))
    c = torch.empty(rows_of_result(name, shape[0], WORLD.size), shape[1], dtype=torch.bfloat16, device=DEVICE)
    graph, found = torch.cuda.CUDAGraph(), []

    def compare(seed: int, call: Any, how: str) -> None:
        for place, x in zip((a, b), inputs(shape, seed), strict=True):
            place.copy_(x)
        c.fill_(torch.nan)
        late = random.Random(seed)
        if late.randrange(WORLD.size) == WORLD.rank:
            torch.cuda._sleep(late.randrange(SKEW_CYCLES))
        call()
        torch.cuda.synchronize()
        kernel.synchronize()
        want = reference(name, a, b)
        if not torch.equal(c, want):
            found.append(f"{how} {seed}: {int((c != want).sum())} of {c.numel()} elements differ")

    for seed in range(CALLS):
        compare(seed, lambda: kernel(a, b, c), "call")
    with torch.cuda.graph(graph):
        kernel(a, b, c)
    for seed in range(CALLS, CALLS + REPLAYS):
        compare(seed, graph.replay, "replay")
    return found


def main() -> int:
    join()
    failed = 0
    for name, shape, blocks in TURNS:
        try:
            found = check(name, shape, blocks)
        except Exception as error:  # noqa: BLE001 - the others are to be checked
            found = [f"{type(error).__name__}: {str(error)[:300]}"]
        failed |= bool(found)
        if found or WORLD.rank == 0:
            said = f"FAIL {'; '.join(found[:3])}" if found else "PASS"
            print(f"rank {WORLD.rank} {name} {shape} {blocks} blocks: {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
