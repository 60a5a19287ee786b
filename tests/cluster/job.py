# SPDX-License-Identifier: MIT
"""Script of the ranks of a job on several nodes: a report of their nodes, and an all-reduce inside nodes and then
across.

    job.py NODES [--stall RANK | --fail RANK | --resume FOLDER]

Without GPUs the program runs on the emulated machine that TILESCALE_MACHINE names.
"""

import argparse
import os
import socket
import time
from pathlib import Path

import torch

import tilescale
import tilescale.language as T

ROWS, COLS = 8, 64


def hierarchical(nodes: int, devices: int):
    """The sum of all ranks' tensors, on every rank."""

    @T.prim_func
    def total(X: T.Tensor((ROWS * devices, COLS), "float32")):
        with T.Kernel(node=nodes, device=devices):
            share = T.alloc((ROWS, COLS), "float32", level="l2")
            with T.Scale("device"):
                T.reduce_scatter(X, share)
            with T.Scale("node"):
                T.allreduce(share)
            with T.Scale("device"):
                T.all_gather(share, X)

    return total


def resumed(folder: Path, rank: int) -> int:
    """The step at which this rank goes on: rank 1 fails once, at step 2, and all have saved their steps."""
    saved = folder / f"step-{rank}"
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done, 4):
        if step == 2 and rank == 1 and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise RuntimeError("the first attempt fails at step 2")
        tilescale.init().barrier()
        saved.write_text(str(step + 1))
    return done


def main() -> None:
    """Run, check, and print one line a rank."""
    options = argparse.ArgumentParser()
    options.add_argument("nodes", type=int)
    options.add_argument("--fail", type=int)
    options.add_argument("--stall", type=int)
    options.add_argument("--resume", type=Path)
    given = options.parse_args()
    world = tilescale.init()
    assert world.nodes == given.nodes, f"{world.nodes} nodes"
    began = 0 if given.resume is None else resumed(given.resume, world.rank)
    if given.fail == world.rank:
        raise ValueError("as asked")
    if given.stall == world.rank:
        print(f"stalls: pid {os.getpid()}", flush=True)
        time.sleep(600)
    X = torch.full((ROWS * world.local_size, COLS), float(world.rank + 1), device=world.device)
    tilescale.compile(hierarchical(world.nodes, world.local_size))(X)
    expected = world.size * (world.size + 1) / 2
    assert bool((X == expected).all()), f"found {X[0, 0].item()}, not {expected}"
    where = f"node {world.node} of {world.nodes}, local rank {world.local_rank} of {world.local_size}"
    print(f"rank {world.rank} on {socket.gethostname()}: {where}, {world.launcher}, from step {began}: right")


if __name__ == "__main__":
    main()
