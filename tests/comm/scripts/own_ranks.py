# SPDX-License-Identifier: MIT
"""A program that starts its ranks itself, without a launcher's variables, and joins them by torch.distributed."""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(rank: int, size: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    import tilescale
    from tilescale import ops

    world = tilescale.init()
    assert (world.rank, world.size, world.launcher) == (rank, size, "torch.distributed")
    assert world.all_gather(rank) == list(range(size))
    x = torch.full((4, 8), rank + 1.0)
    assert torch.equal(
        ops.all_reduce(x, group=dist.new_group(list(range(size)))), torch.full((4, 8), size * (size + 1) / 2)
    )
    print("passed", flush=True)
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]), free_port()), nprocs=int(sys.argv[1]))
