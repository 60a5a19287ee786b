# SPDX-License-Identifier: MIT
"""Successful operations in one job: the facts of the world, every collective, teams, caught errors, large tensors."""

import sys

import torch

from tilescale.comm import current_world, init
from tilescale.errors import UsageError

assert current_world() is None
launcher, size = sys.argv[1], int(sys.argv[2])
world = init()
assert init(timeout_s=1) is world and current_world() is world
rank = world.rank
assert (world.size, world.local_size, world.local_rank) == (size, size, rank)
assert (world.node, world.nodes) == (0, 1)
assert world.launcher == launcher, world.launcher
last = size - 1

world.barrier()
assert world.gather(rank * 2, root=last) == ([2 * r for r in range(size)] if rank == last else None)
assert world.scatter([f"to {r}" for r in range(size)] if rank == 0 else None) == f"to {rank}"
assert world.broadcast({"from": rank}, root=last) == {"from": last}
assert world.all_gather((rank, "x")) == [(r, "x") for r in range(size)]
assert world.team("node").all_gather(rank) == list(range(size))

if size > 2 and rank in (0, 2):
    pair = world.team([2, 0])
    assert (pair.size, pair.rank, pair.ranks) == (2, int(rank == 0), (2, 0))
    assert pair.all_gather(rank) == [2, 0]
    assert world.team([2, 0]).broadcast(rank, root=0) == 2


def rotate(payloads):
    return payloads[1:] + payloads[:1]


def fail(payloads):
    raise KeyError(f"no {payloads}")


following = (rank + 1) % size
rows = 4096 if size == 2 else 256  # 64 MB, or 4 MB where one more large one would only cost time
tensor = torch.full((rows, 4096), rank, dtype=torch.float32)
received = world.run_at_root([tensor, rank], rotate, root=last)
assert received[1] == following and received[0].shape == tensor.shape and bool((received[0] == following).all())
received[0] += 1  # it is the receiver's own memory
assert bool((tensor == rank).all()) or size == 1

try:
    world.run_at_root(rank, fail, root=last)
except KeyError as error:
    assert str(list(range(size))) in str(error) and f"rank {last}" in error.__notes__[0], error.__notes__
else:
    raise AssertionError("the error of fn did not arrive")
try:
    world.run_at_root(rank, lambda payloads: [])
except UsageError as error:
    assert "0 results" in str(error)

world.barrier()  # an error in fn leaves the job usable
print(f"rank {rank} is content")
