# SPDX-License-Identifier: MIT
"""Experts between two exchanges: phases of TileScale, overlapped and in order, and NCCL alternating with cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import trials
from trials import Case, checked, ours, returning

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

TILE, STAGES, THREADS = (128, 256, 64), 4, 256


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Experts of each GPU, rows of each GPU for each expert, features outside and inside."""
    if gpus == 1:
        return
    for shape in [(2, 128, 512, 256)] if quick else [(8, 512, 4096, 2048)]:
        local, capacity, width, hidden = shape
        flops = 4 * gpus * local * capacity * width * hidden
        entries = Experts(*shape).contenders()
        yield Heat("grouped_experts", shape, "bfloat16", gpus, "eager", "cublas alone", entries, flops)


class Experts:
    """Send equal numbers of rows of each GPU to each expert, through its two GEMMs, and back."""

    def __init__(self, local: int, capacity: int, width: int, hidden: int):
        self.local, self.capacity, self.width, self.hidden = local, capacity, width, hidden
        self.size = tilescale.init().size
        self.rows = (self.size, local, capacity, width)

    def contenders(self) -> list[Contender]:
        return [
            Contender("cublas alone", self.alone),
            Contender("nccl+cublas", self.libraries),
            ours("tilescale", lambda: tilescale.compile(self.program()).ir, self.own),
            ours("tilescale in order", self.program, self.own),
        ]

    def program(self) -> Any:
        """The phases of the example."""
        made = trials.example("24_grouped_experts").with_capacity
        shape = self.size, self.local, self.capacity, self.width, self.hidden
        return made(*shape, tile=TILE, stages=STAGES, threads=THREADS)

    def draw(self, seed: int) -> Case:
        """Rows for all experts, and the weights of the local ones."""
        shapes = self.rows, (self.local, self.width, self.hidden), (self.local, self.hidden, self.width)
        x, up, down = trials.randoms(seed, torch.bfloat16, *shapes)
        come = _exchanged(x).float()
        first = (come @ up.float()).clamp_min(0)
        off = trials.product_bound(self.width, first, come.abs() @ up.float().abs()) - 2.0**-8 * first
        inner = first**2
        want = inner @ down.float()
        bound = (2 * first * off + 2.0**-8 * inner) @ down.float().abs()
        bound += trials.product_bound(self.hidden, want, inner @ down.float().abs())
        return Case((x, up, down), _exchanged(want), 1.01 * _exchanged(bound))

    def operands(self) -> list[torch.Tensor]:
        """Buffers for rows and weights."""
        shapes = self.rows, (self.local, self.width, self.hidden), (self.local, self.hidden, self.width)
        return [trials.nothing(*shape) for shape in shapes]

    def alone(self) -> Runner:
        """cuBLAS on local rows, expert by expert; the result is not used."""
        rows = (self.local, self.size * self.capacity, self.width)
        shapes = rows, (self.local, self.width, self.hidden), (self.local, self.hidden, self.width)
        x, up, down = trials.randoms(0, torch.bfloat16, *shapes)
        return Runner(lambda: torch.bmm(torch.bmm(x, up).relu_().square_(), down), lambda seed: None)

    def libraries(self) -> Runner:
        """cuBLAS between two exchanges of NCCL."""
        x, up, down = self.operands()
        come, made, y = (trials.nothing(*self.rows) for _ in range(3))

        def call() -> torch.Tensor:
            dist.all_to_all_single(come, x)
            for rows, results in zip(come, made, strict=True):
                torch.bmm(torch.bmm(rows, up).relu_().square_(), down, out=results)
            dist.all_to_all_single(y, made)
            return y

        return checked(self.draw, trials.into(x, up, down), call, [come, made, y])

    def own(self, kernel: Any) -> Runner:
        operands, y = self.operands(), trials.symmetric(*self.rows)
        call = returning(y, kernel, *operands, y)
        return checked(self.draw, trials.into(*operands), call, [y], kernel.synchronize)


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Rows of all GPUs for this one."""
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x.contiguous())
    return y
