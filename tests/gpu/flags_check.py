# SPDX-License-Identifier: MIT
"""Flags that kernels clear: thousands of replayed calls, ranks out of step, calls that are stopped in between.

    torchrun --nproc-per-node N tests/gpu/flags_check.py [names]

Every call changes the data of the next one, so a call that used the previous call's flags shows in all later ones.
Prints PASS or FAIL for each program and rank.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tilescale.errors import TileScaleError  # noqa: E402

LIMIT_S = 220.0
WAIT_S = 0.4
TILE, COLUMNS = 16, 64
ROUNDS, REPLAYS = 4, 1000


def passed_on(blocks: int, tells: int, devices: Any) -> Any:
    """Send each block's tile to the next device, with `tells` signals in addition to the copy's, without waits for
    them.
    """

    @T.prim_func
    def passed_on(
        X: T.Tensor((TILE * blocks, COLUMNS), "float32"),
        Y: T.Tensor((TILE * blocks, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=128) as bx:
            arrived = T.alloc_flags((blocks,))
            told = T.alloc_flags((blocks, 3), "int64")
            with T.Scale("block"):
                tile = T.alloc((TILE, COLUMNS), "float32", level="l1")
                with T.Scale("device") as (rank, size):
                    T.copy(X[bx * TILE, 0], tile)
                    T.copy(tile, Y[bx * TILE, 0], dst=(rank + 1) % size, signal=arrived[bx])
                    if tells:
                        for k in T.serial(tells):
                            T.signal(told[bx, k], dst=(rank + 1) % size)
                    T.wait(arrived[bx], "==", 1)
                    for i, j in T.Parallel(TILE, COLUMNS):
                        X[bx * TILE + i, j] = Y[bx * TILE + i, j] * 0.5 + rank

    return passed_on.with_attr("global_symbol", f"passed_on_{blocks}_{tells}")


def model(ranks: list[torch.Tensor], calls: int) -> list[torch.Tensor]:
    """X of every rank after a number of calls."""
    for _ in range(calls):
        ranks = [ranks[rank - 1] * 0.5 + rank for rank in range(len(ranks))]
    return ranks


class Check:
    """One program on this rank."""

    def __init__(self, blocks: int, tells: int):
        self.world = tilescale.init()
        self.kernel = tilescale.compile(passed_on(blocks, tells, self.world.size), wait_s=WAIT_S)
        self.x, self.y = (tilescale.zeros((TILE * blocks, COLUMNS), dtype=torch.float32) for _ in range(2))
        self.graph = torch.cuda.CUDAGraph()

    def run(self) -> None:
        """Calls, replays of a captured call, a call that is stopped, and all of that again."""
        self.kernel(self.x, self.y)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.kernel(self.x, self.y)
        for round in range(ROUNDS):
            self.agrees(round, 5, lambda: self.kernel(self.x, self.y))
            self.agrees(round, REPLAYS, self.graph.replay)
            self.stop(round % self.world.size)

    def agrees(self, seed: int, calls: int, call: Any) -> None:
        """Check that a number of calls, at times with delays on some devices, end with the model's results."""
        generator, delays = torch.Generator().manual_seed(seed), random.Random(1000 * seed + self.world.rank)
        start = [torch.randn(self.x.shape, generator=generator) for _ in range(self.world.size)]
        self.x.copy_(start[self.world.rank])
        self.y.fill_(torch.nan)
        torch.cuda.synchronize()
        self.world.barrier()
        for _ in range(calls):
            if delays.random() < 0.1:
                torch.cuda._sleep(delays.randrange(40_000))
            call()
        self.kernel.synchronize()
        torch.testing.assert_close(self.x.cpu(), model(start, calls)[self.world.rank], rtol=1e-6, atol=1e-6)

    def stop(self, absent: int) -> None:
        """All but one rank call and find that it does not come; what they sent it must not count later."""
        if self.world.rank != absent:
            try:
                self.kernel(self.x, self.y)
                self.kernel.synchronize()
            except TileScaleError:
                pass
            else:
                raise AssertionError(f"rank {absent} did not come, and nobody noticed")
        self.world.barrier()
        self.kernel.reset()


PROGRAMS = {"one_block": (1, 0), "blocks": (7, 0), "unawaited": (5, 3)}
"""Name -> blocks, and number of signals without a wait: then all synchronize as they leave."""


if __name__ == "__main__":
    named_checks.run(((name, lambda shape=shape: Check(*shape).run()) for name, shape in PROGRAMS.items()), LIMIT_S)
