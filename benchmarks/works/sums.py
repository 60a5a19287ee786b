# SPDX-License-Identifier: MIT
"""GEMM whose blocks sum their tiles over all GPUs, compared with cuBLAS and NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fused
import trials
from programs import Tiling
from tile_programs import product_allreduce
from trials import checked, ours, returning

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

ROWS = (4096, 1024, 128)
BLOCKS = 132
"""Blocks of a grid that is resident on an H100 or H200."""
FEW_WAVES = 4
"""Number of rows up to which small tiles take less time: the last wave has no GEMM to overlap its sends with."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All shapes, M x N x K: K of each GPU."""
    if gpus == 1:
        return
    n, k = (2048, 512) if quick else (8192, 3584)
    for m in ROWS[1:] if quick else ROWS:
        entries = Summed(m, n, k).contenders()
        yield Heat("product_allreduce", (m, n, k), "bfloat16", gpus, "graph", "nccl+cublas", entries, 2 * m * n * k)


class Summed(fused.Summed):
    """C = A B^T: the inner dimension is split over the GPUs, each ends with all of C."""

    def contenders(self) -> list[Contender]:
        libraries = [Contender("cublas alone", self.alone), Contender("nccl+cublas", self.libraries)]
        return [*libraries, *(ours(*form, self.own) for form in self._forms())]

    def _forms(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Names and programs.

        If one wave of narrow tiles is enough, that; otherwise a persistent grid, with the stages that fit next to the
        result.
        """
        if self.m == Tiling.m:
            yield "tilescale", self._program(Tiling(n=64, k=128))
            yield "tilescale, short steps", self._program(Tiling(n=64, stages=6))
            return
        large, small = Tiling(stages=3), Tiling(n=128, stages=5)
        waves = self.m // large.m * (self.n // large.n) / BLOCKS
        first, second = (large, small) if waves > FEW_WAVES else (small, large)
        yield "tilescale", self._program(first, BLOCKS)
        yield f"tilescale, {second.n} wide", self._program(second, BLOCKS)
        yield "tilescale, a block a tile", self._program(large)

    def _program(self, t: Tiling, blocks: int = 0) -> Callable[[], Any]:
        return lambda: product_allreduce(tilescale.init().size, self.m, self.n, self.k, t, blocks)

    def own(self, kernel: Any) -> Runner:
        (a, b), c = self.operands(), trials.nothing(self.m, self.n)
        call = returning(c, kernel, a[None], b, c)
        return checked(self.draw, trials.into(a, b), call, [c], kernel.synchronize)
