# SPDX-License-Identifier: MIT
"""Ranks of a job are killed one after the other, and the others go on with `tilescale.shrink()`. ONE PROCESS starts it.

    python tests/gpu/survivors_check.py [ranks]        all GPUs; more ranks than GPUs with TILESCALE_SHARE_GPUS=1
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.errors import RankFailedError  # noqa: E402

TRIES = 20
"""Calls until one raises that a rank is gone: calls return before their kernels have waited for it."""


def check(world: tilescale.World, first: int) -> None:
    """Operators of all ranks, eagerly and in a graph, with tensors that say which rank they are of."""
    firsts = world.all_gather(first)
    x = torch.full((24, 64), float(first), device=world.device, dtype=torch.bfloat16)
    weight = torch.eye(64, device=world.device, dtype=torch.bfloat16)

    def calls() -> tuple[torch.Tensor, ...]:
        return ops.all_reduce(x), ops.all_gather(x), ops.matmul_all_reduce(x, weight), ops.broadcast(x, world.size - 1)

    for made in (calls(), calls(), *([captured(calls)] if x.is_cuda else [])):
        total, whole, product, last = (result.float().cpu() for result in made)
        if not bool((total == sum(firsts)).all() and (product == sum(firsts)).all() and (last == firsts[-1]).all()):
            raise ValueError(f"sums of {firsts} are {total[0, 0]} and {product[0, 0]}, the last is {last[0, 0]}")
        if whole[::24, 0].tolist() != firsts:
            raise ValueError(f"{whole[::24, 0].tolist()} were gathered of {firsts}")


def captured(calls: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The results of a graph of calls."""
    torch.cuda.synchronize()
    graph, made = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        made += calls()
    graph.replay()
    torch.cuda.synchronize()
    return tuple(made)


def wait_for_the_end_of(dead: int, device: torch.device) -> None:
    """Calls operators until one raises the error that names the dead rank."""
    for _ in range(TRIES):
        try:
            ops.all_reduce(torch.ones(4, device=device))
            if device.type == "cuda":
                torch.cuda.synchronize()
        except RankFailedError as error:
            if f"rank {dead}" not in str(error):
                raise
            return
    raise ValueError(f"rank {dead} is gone, and no operator has raised it")


def main() -> None:
    """A rank."""
    world = tilescale.init()
    first, ranks = world.rank, world.size
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    check(world, first)
    for number in range(ranks - 1):
        dead = world.size - 1 if number % 2 else 1  # not always the last one
        if world.rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_the_end_of(dead, world.device)
        world = tilescale.shrink()
        check(world, first)
        print(f"PASS {world.size} of {ranks} ranks, rank {first} is rank {world.rank}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        main()
    else:
        ranks = (sys.argv[1:] or [str(max(torch.cuda.device_count(), 2))])[0]
        run = [sys.executable, "-c", "from tilescale.cli import main; main()", "run", "-n", ranks, "--keep-going"]
        sys.exit(subprocess.run([*run, __file__, "rank"], check=False).returncode)
