# SPDX-License-Identifier: MIT
"""Calls that one rank rejects: the others are notified immediately, and all continue with the next call."""

import time
from collections.abc import Callable

import torch

import tilescale
from tilescale import ops
from tilescale.errors import RankMismatchError, TileScaleError

SOON_S = 20.0  # of a timeout of 50


def raised(call: Callable[[], object]) -> TileScaleError:
    """The error of a call, which must not wait for other ranks."""
    begin = time.monotonic()
    try:
        call()
    except TileScaleError as error:
        assert time.monotonic() - begin < SOON_S, error
        return error
    raise AssertionError("no error")


def main() -> None:
    world = tilescale.init()
    tilescale.empty((1,))  # opening the heap is a call of its own
    a, layer = torch.ones(3, 2), ops.RowParallelLinear.shard(torch.nn.Linear(3, 2))
    wrong = {
        "ArgumentError: sent has": lambda: ops.all_to_all_v(a, [1, 2], [9, 9]),
        "ArgumentError: a is torch.int16": lambda: ops.all_reduce(a.to(torch.int16)),
        "ArgumentError: x has 1 tokens": lambda: layer(torch.ones(1, 1)),
        "ArgumentError: rows is -1": lambda: ops.workspace(-1, 8),
        "ArgumentError: run is int": lambda: ops.warm_up(1),
        "ShapeError: a symmetric tensor of shape (-1,)": lambda: tilescale.empty((-1,)),
        "UsageError: root 9": lambda: world.broadcast(0, root=9),
    }
    for rank in range(world.size):
        for text, refused in wrong.items():
            error = raised(refused if world.rank == rank else lambda: ops.all_reduce(a))
            assert isinstance(error, RankMismatchError) is (world.rank != rank), error
            assert text.partition(": ")[2] in error.message, error
            if world.rank != rank:
                assert text in error.message and f"rank {rank}" in error.message, error
                assert len({place.line for place in error.where}) == 2, error
            assert ops.all_reduce(a).tolist() == [[world.size] * 2] * 3, "the group is usable"
    print(f"passed {world.rank}")


if __name__ == "__main__":
    main()
