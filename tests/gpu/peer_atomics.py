# SPDX-License-Identifier: MIT
"""Additions at peers, waits for several flags, and values of one thread: programs of `peer_programs.py` on GPUs.

    torchrun --nproc-per-node N tests/gpu/peer_atomics.py [names]

Every rank looks at the arguments of all. Ranks begin out of step, results are poisoned where a program writes all of
them, and one program adds to the same elements from all ranks until lost updates would show. Prints PASS or FAIL for
each program and rank.
"""

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
import tilescale.language as T  # noqa: E402
from tests.cuda.peer_programs import CASES  # noqa: E402
from tests.gpu import named_checks  # noqa: E402

LIMIT_S = 280.0
WAIT_S = 2.0
CALLS = 20
ROUNDS, TILE = 200, 1024


def agrees(name: str) -> None:
    """Calls of one program out of step, each with arguments as at first."""
    world, case = tilescale.init(), CASES[name]
    given = case.tensors(world.rank, world.size)
    held = [tilescale.zeros(tuple(tensor.shape), dtype=tensor.dtype) for tensor in given]
    kernel = tilescale.compile(case.make(world.size), wait_s=WAIT_S)
    delays = random.Random(world.rank)
    for call in range(CALLS):
        for tensor, first in zip(held, given, strict=True):
            tensor.copy_(first)
        torch.cuda.synchronize()
        world.barrier()
        torch.cuda._sleep(delays.randrange(200_000) if call else 0)
        kernel(*held)
        kernel.synchronize()
        case.check(world.all_gather([tensor.cpu() for tensor in held]))


def contended(devices: int, impl: str | None) -> object:
    """All blocks of all devices add ones to one tile of device 0, again and again."""

    @T.prim_func
    def contended(Y: T.Tensor((TILE,), "float32"), n: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=32, threads=128):
            with T.Scale("block"):
                tile = T.alloc((TILE,), "float32")
                T.fill(tile, 1.0)
                with T.Scale("device"):
                    for _ in T.serial(ROUNDS):
                        T.atomic_add(Y[0:TILE], tile, dst=0, impl=impl)
                        T.atomic_add(n[0], 1, dst=0)

    return contended


def loses_nothing(impl: str | None) -> None:
    """Updates of one tile by all ranks at once."""
    world = tilescale.init()
    y, n = tilescale.zeros((TILE,), dtype=torch.float32), tilescale.zeros((1,), dtype=torch.int32)
    kernel = tilescale.compile(contended(world.size, impl), wait_s=WAIT_S)
    total = 32 * ROUNDS * world.size
    for call in range(1, 4):
        world.barrier()
        kernel(y, n)
        kernel.synchronize()
        if world.rank == 0:
            assert n.item() == call * total, f"{call * total - n.item()} of {call * total} updates of a number are lost"
            lost = (call * total - y).abs()
            assert not lost.any(), f"{int((lost > 0).sum())} of {TILE} elements have lost up to {lost.max().item()}"


if __name__ == "__main__":
    checks = [(name, lambda name=name: agrees(name)) for name in CASES]
    checks += [(f"contended_{impl or 'lsu'}", lambda impl=impl: loses_nothing(impl)) for impl in (None, "tma")]
    named_checks.run(checks, LIMIT_S)
