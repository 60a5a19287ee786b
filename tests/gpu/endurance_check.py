# SPDX-License-Identifier: MIT
"""Many calls: a graph replayed 1,000 times, kernels on several streams, tiles that wait in each of 2,000 calls.

    torchrun --nproc-per-node N THIS [names]

Every call changes the tensors that the next one reads, so one wrong call shows in all later ones; a float64 model on
the CPU makes the same steps. Ranks are out of step by random delays. Prints PASS or FAIL for each check and rank.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tests.overlap.support import H200  # noqa: E402
from tilescale.tuning.programs import gather_and_gemm  # noqa: E402

LIMIT_S = 220.0
ROWS, COLUMNS = 96, 64
REPLAYS, LOOK_EVERY = 1000, 100
ROUNDS, CALLS = 10, 6
PRODUCT, BATCHES, QUEUED = (4096, 3584, 8192), 10, 200


def shift_and_sum(tile_impl: str) -> Any:
    """X goes to the next device as a whole and back by tiles; then every device mixes in the mean of all."""
    devices = tilescale.init().size

    @T.prim_func
    def step(
        X: T.Tensor((ROWS, COLUMNS), "float32"),
        Y: T.Tensor((ROWS, COLUMNS), "float32"),
        S: T.Tensor((ROWS, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=3, threads=128) as bx:
            with T.Scale("device") as (rank, size):
                T.barrier()
                T.copy(X, Y, dst=(rank + 1) % size)
                T.barrier()
                for i, j in T.Parallel(ROWS, COLUMNS):
                    S[i, j] = Y[i, j] / size
                T.allreduce(S, impl="one_shot")
            with T.Scale("block"):
                tile = T.alloc((32, COLUMNS), "float32", level="l1")
                mean = T.alloc((32, COLUMNS), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    T.copy(Y[bx * 32, 0], tile)
                    T.copy(tile, X[bx * 32, 0], dst=(rank + size - 1) % size, impl=tile_impl)
                    T.barrier()
                T.copy(S[bx * 32, 0], mean)
                for i, j in T.Parallel(32, COLUMNS):
                    X[bx * 32 + i, j] = X[bx * 32 + i, j] * 0.5 + mean[i, j] * 0.25 + rank

    return step


def model(ranks: list[torch.Tensor], calls: int) -> list[torch.Tensor]:
    """X of every rank after a number of calls, in float64."""
    ranks = [x.double() for x in ranks]
    for _ in range(calls):
        mean = sum(ranks) / len(ranks)
        ranks = [x * 0.5 + mean * 0.25 + rank for rank, x in enumerate(ranks)]
    return ranks


class Runner:
    """One program with its symmetric tensors on this rank."""

    def __init__(self, tile_impl: str, seed: int):
        self.world = tilescale.init()
        self.kernel = tilescale.compile(shift_and_sum(tile_impl))
        self.tensors = [tilescale.zeros((ROWS, COLUMNS), dtype=torch.float32) for _ in range(3)]
        self.seed = seed

    def begin(self) -> None:
        """Fresh inputs; the other tensors are poisoned."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        self.start = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(self.world.size)]
        self.tensors[0].copy_(self.start[self.world.rank])
        for tensor in self.tensors[1:]:
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        self.world.barrier()
        time.sleep(random.random() * 0.005)

    def call(self) -> None:
        """One call on the current stream."""
        self.kernel(*self.tensors)

    def compare(self, calls: int) -> None:
        """Raise unless X equals the model's."""
        torch.cuda.synchronize()
        expected = model(self.start, calls)[self.world.rank]
        torch.testing.assert_close(self.tensors[0].cpu().double(), expected, rtol=1e-4, atol=1e-4)


def replays() -> None:
    """A captured call, replayed 1,000 times in batches without a look in between."""
    runner = Runner("lsu", seed=0)
    runner.begin()
    runner.call()
    runner.compare(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.call()
    for _ in range(REPLAYS // LOOK_EVERY):
        runner.begin()
        for _ in range(LOOK_EVERY):
            graph.replay()
        runner.compare(LOOK_EVERY)


def streams() -> None:
    """Two programs, each on a separate stream, which only the library keeps from interfering."""
    runners = [Runner("lsu", seed=100), Runner("tma", seed=200)]
    lanes = [torch.cuda.Stream() for _ in runners]
    for _ in range(ROUNDS):
        for runner in runners:
            runner.begin()
        for _ in range(CALLS):
            for runner, stream in zip(runners, lanes, strict=True):
                with torch.cuda.stream(stream):
                    runner.call()
        for runner in runners:
            runner.compare(CALLS)


def in_a_row() -> None:
    """A gather overlapped with a GEMM, whose tiles wait for rows: batches of calls without a check in between."""
    world, (rows, columns, inner) = tilescale.init(), PRODUCT
    kernel = tilescale.compile(gather_and_gemm(H200, world.size, PRODUCT))
    shapes = (rows // world.size, inner), (inner, columns), (rows, inner), (rows, columns)
    a, b, gathered, c = (tilescale.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    for _ in range(BATCHES):
        for tensor in (a, b):
            tensor.normal_(0, 0.1)
        for tensor in (gathered, c):
            tensor.fill_(float("nan"))
        kernel.synchronize()
        world.barrier()
        time.sleep(random.random() * 0.005)
        for _ in range(QUEUED):
            kernel(a, b, gathered, c)
        kernel.synchronize()
        want = gathered.float() @ b.float()
        torch.testing.assert_close(c.float(), want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


if __name__ == "__main__":
    named_checks.run(((check.__name__, check) for check in (replays, streams, in_a_row)), LIMIT_S)
