# SPDX-License-Identifier: MIT
"""Whether short messages arrive atomically: thousands of them, each computed from the previous one.

    torchrun --nproc-per-node N THIS [names]

Every call sums integers over the ranks, or gathers them, and hashes the result: one bit of an older message in place of
a new one changes all that follows. Every rank also computes the same steps for all ranks. Ranks are out of step by
random delays. Prints PASS or FAIL for each check and rank.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu import named_checks  # noqa: E402

LIMIT_S = 140.0
COUNTS = (31, 2_000, 30_000, 250_000)
BATCHES, CALLS = 20, 100
FACTOR, SLEEP_CYCLES = 1_664_525, 200_000


def summed(count: int, impl: str) -> Any:
    """X becomes the sum over all ranks, stirred, and another number on each."""
    size, blocks = tilescale.init().size, -(-count // 1024)

    @T.prim_func
    def step(X: T.Tensor((count,), "int32")):
        with T.Kernel(device=size, block=blocks, threads=256) as block:
            with T.Scale("device"):
                T.allreduce(X, impl=impl)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                for i in T.Parallel(1024):
                    if block * 1024 + i < count:
                        X[block * 1024 + i] = X[block * 1024 + i] * FACTOR + rank

    return step


def gathered(count: int) -> Any:
    """X becomes the sum of what has been gathered, by a rank's own rule."""
    size, blocks = tilescale.init().size, -(-count // 1024)

    @T.prim_func
    def step(X: T.Tensor((count,), "int32")):
        with T.Kernel(device=size, block=blocks, threads=256) as block:
            Y = T.alloc((size * count,), "int32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, Y)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                total = T.alloc((1024,), "int32", level="l0")
                for i in T.Parallel(1024):
                    total[i] = 0
                for source in T.serial(size):
                    for i in T.Parallel(1024):
                        if block * 1024 + i < count:
                            total[i] += Y[source * count + block * 1024 + i]
                for i in T.Parallel(1024):
                    if block * 1024 + i < count:
                        X[block * 1024 + i] = total[i] * FACTOR + rank

    return step


def stirred(ranks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Result of a call for all ranks' X, modulo 2^32."""
    total = sum(ranks[1:], ranks[0])
    return [total * FACTOR + rank for rank in range(len(ranks))]


def check(program: Any, count: int) -> None:
    """A captured call, replayed in batches, with the same integers made on this rank alone."""
    world, kernel = tilescale.init(), tilescale.compile(program)
    generator = torch.Generator(world.device).manual_seed(count)
    ranks = [
        torch.randint(-(2**31), 2**31, (count,), generator=generator, device=world.device, dtype=torch.int32)
        for _ in range(world.size)
    ]
    mine = ranks[world.rank].clone()
    kernel(mine)
    ranks = stirred(ranks)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(mine)
    chance = random.Random(world.rank)
    for batch in range(BATCHES):
        for _ in range(CALLS):
            if chance.random() < 0.1:
                torch.cuda._sleep(chance.randrange(SLEEP_CYCLES))
            graph.replay()
        for _ in range(CALLS):
            ranks = stirred(ranks)
        torch.cuda.synchronize()
        wrong = int((mine != ranks[world.rank]).sum())
        if wrong:
            raise ValueError(f"{wrong} of {count} integers are wrong after {(batch + 1) * CALLS} replays")


def checks() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for count in COUNTS:
        for impl in ("one_shot", "two_shot"):
            found[f"{impl} {count}"] = lambda count=count, impl=impl: check(summed(count, impl), count)
        found[f"all_gather {count}"] = lambda count=count: check(gathered(count), count)
    return found


if __name__ == "__main__":
    named_checks.run(checks().items(), LIMIT_S)
