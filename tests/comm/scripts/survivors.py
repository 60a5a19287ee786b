# SPDX-License-Identifier: MIT
"""A job whose ranks are killed one after the other, while those that live go on: `survivors.py how`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import tilescale
from tilescale import ops
from tilescale.errors import RankFailedError, UsageError

HOW = sys.argv[1]
WORLD = tilescale.init()
FIRST = WORLD.rank


def check(world: tilescale.World) -> None:
    """Operators and symmetric memory of all ranks, whose tensors say which rank they are of."""
    x = torch.full((3, 5), float(FIRST))
    firsts = world.all_gather(FIRST)
    assert firsts == sorted(firsts) and firsts[world.rank] == FIRST
    for _ in range(2):
        assert (ops.all_reduce(x) == sum(firsts)).all()
        assert ops.all_gather(x)[::3, 0].tolist() == firsts
        assert (ops.broadcast(x, world.size - 1) == firsts[-1]).all()
    assert tilescale.zeros((world.size, 8)).shape == (world.size, 8)


def end(number: int) -> None:
    """End this rank: killed, by an error, or by leaving."""
    if HOW == "raise":
        raise ValueError(f"no more tea for rank {FIRST}")
    if HOW == "leave" or (HOW == "mixed" and number % 2):
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    world = WORLD
    check(world)
    for number in range(WORLD.size - 1):
        last = world.size - 1 if number % 2 else 1  # not always the last one
        if world.rank == last:
            time.sleep(0.1 * number)
            end(number)
        try:
            ops.all_reduce(torch.ones(4))
            raise AssertionError("a rank is gone, and nobody has said so")
        except RankFailedError as error:
            assert f"rank {last}" in str(error), error
        before, world = world, tilescale.shrink()
        assert world is tilescale.init() and world.size == before.size - 1
        assert world.rank == before.rank - (before.rank > last)
        check(world)
        try:
            before.barrier()
            raise AssertionError("a group with a dead rank met")
        except (RankFailedError, UsageError):
            pass
    print(f"rank {FIRST} is alone", flush=True)


main()
