# SPDX-License-Identifier: MIT
"""GEMMs of warpgroups whose operand arrives from a peer while they multiply, with several forms of waits."""

from typing import Any

import torch

import tilescale.language as T

ROWS, COLUMNS, STEP = 128, 128, 64
DTYPE = "bfloat16"

VARIANTS: dict[str, dict[str, Any]] = {
    "each step": {},
    "some steps": {"waits": "some steps"},
    "between loads": {"waits": "between loads"},
    "in front": {"waits": "in front"},
    "each step and in front": {"waits": "each step and in front"},
    "turns": {"turns": 2},
    "turns, in front": {"turns": 2, "waits": "in front"},
    "tail": {"tail": 32},
    "one stage": {"stages": 1, "waits": "some steps", "tail": 32},
    "pulled": {"pulls": True},
    "pulled, between loads": {"pulls": True, "waits": "between loads", "tail": 32},
    "pulled, in front": {"pulls": True, "waits": "in front"},
    "pulled, turns": {"pulls": True, "turns": 2},
    "pulled, one stage": {"pulls": True, "stages": 1, "waits": "some steps"},
    "pulled, at once": {"pulls": True, "waits": "never"},
}
"""Arguments of `arriving`."""


def arriving(
    waits: str = "each step",
    *,
    devices: Any = T.ALL,
    steps: int = 6,
    turns: int = 1,
    tail: int = 0,
    stages: int = 3,
    sends: bool = True,
    pulls: bool = False,
) -> Any:
    """C = X of the previous device times B: block 0 sends X tile by tile, block 1 multiplies.

    Args:
        waits: for the flag of "each step", of "some steps" (every second one, for two), of each step "between loads"
            (local operands are loaded before), or "in front" of the loop for the last one. "never": block 1 pulls X.
        turns: times ROWS are the rows.
        tail: excess columns of the last tile.
        sends: whether block 0 does so; else the caller has put Y and the flags there.
        pulls: block 0 only puts tiles into its own Y, and signals; block 1 loads them from there.
    """
    height, inner = turns * ROWS, steps * STEP - tail
    sends = sends and waits != "never"

    @T.prim_func
    def run(
        X: T.Tensor((height, inner), DTYPE),
        Y: T.Tensor((height, inner), DTYPE),
        B: T.Tensor((inner, COLUMNS), DTYPE),
        C: T.Tensor((height, COLUMNS), "float32"),
        flags: T.Tensor((turns, steps), "int32"),
        count: T.int32,
        epoch: T.int32,
    ):
        with T.Kernel(device=devices, block=2, threads=256) as bx:
            with T.Scale("block"), T.Scale("device") as (d, n):
                sent = T.alloc((ROWS, STEP), DTYPE, level="l1")
                a = T.alloc((ROWS, STEP), DTYPE, level="l1")
                b = T.alloc((STEP, COLUMNS), DTYPE, level="l1")
                c = T.alloc((ROWS, COLUMNS), "float32", level="l0")
                if bx == 0:
                    for turn in T.serial(turns if sends else 0):
                        for step in T.serial(steps):
                            T.copy(X[turn * ROWS, step * STEP], sent)
                            if pulls:
                                T.copy(sent, Y[turn * ROWS, step * STEP])
                                T.signal(flags[turn, step], dst=(d + 1) % n)
                            else:
                                T.copy(sent, Y[turn * ROWS, step * STEP], dst=(d + 1) % n, signal=flags[turn, step])
                else:
                    for turn in T.serial(turns):
                        with T.Scale("warpgroup"):
                            T.clear(T.view(c, layout=T.Replica))
                        if "in front" in waits:
                            T.wait(flags[turn, steps - 1], ">=", epoch)
                        for step in T.Pipelined(count if turns == 1 else steps, num_stages=stages):
                            if waits.startswith("each step"):
                                T.wait(flags[turn, step], ">=", epoch)
                            if waits == "some steps" and step % 2 == 0:
                                T.wait(flags[turn, T.min(step + 1, steps - 1)], ">=", epoch)
                            T.copy(B[step * STEP, 0], b)
                            if waits == "between loads":
                                T.wait(flags[turn, step], ">=", epoch)
                            if pulls:
                                T.copy((Y if sends else X)[turn * ROWS, step * STEP], a, src=(d + n - 1) % n)
                            else:
                                T.copy(Y[turn * ROWS, step * STEP], a)
                            with T.Scale("warpgroup"):
                                columns, rows = T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow)
                                T.gemm(columns, rows, T.view(c, layout=T.Replica))
                        with T.Scale("warpgroup"):
                            T.allreduce(T.view(c, layout=T.Replica))
                        T.copy(c, C[turn * ROWS, 0])

    return run


def operands(seed: int, rank: int, *, steps: int = 6, turns: int = 1, tail: int = 0, **_: Any) -> list[torch.Tensor]:
    """X and B of a rank, which every other one can make, too."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shapes = (turns * ROWS, steps * STEP - tail), (steps * STEP - tail, COLUMNS)
    return [torch.randn(shape, generator=generator).to(getattr(torch, DTYPE)) for shape in shapes]


def product(seed: int, rank: int, devices: int, count: int, **how: Any) -> torch.Tensor:
    """Expected C of a rank after `count` iterations, in float64."""
    used = slice(0, count * STEP)
    x, b = operands(seed, (rank - 1) % devices, **how)[0], operands(seed, rank, **how)[1]
    return x[:, used].double() @ b[used].double()
