# SPDX-License-Identifier: MIT
"""A product whose tiles are summed over all GPUs by the blocks that made them, beside cuBLAS and NCCL."""

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
"""A grid that is on an H100 or H200 as a whole."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All shapes, M x N x K: K of each GPU."""
    if gpus == 1:
        return
    n, k = (2048, 512) if quick else (8192, 3584)
    for m in ROWS[1:] if quick else ROWS:
        entries = Summed(m, n, k).contenders()
        yield Heat("product_allreduce", (m, n, k), "bfloat16", gpus, "graph", "nccl+cublas", entries, 2 * m * n * k)


class Summed(fused.Summed):
    """C = A B^T: the inner dimension lies over the GPUs, each ends with the whole."""

    def contenders(self) -> list[Contender]:
        """Libraries, then ours."""
        forms = {"tilescale": self._tiling(), "tilescale, 128 wide": Tiling(n=128)}
        one_each = Tiling(n=128 if self.m > Tiling.m else 64)
        return [
            Contender("cublas alone", self.alone),
            Contender("nccl+cublas", self.libraries),
            *(ours(name, self._program(tiling, BLOCKS), self.own) for name, tiling in forms.items()),
            ours("tilescale, a block a tile", self._program(one_each), self.own),
        ]

    def _tiling(self) -> Tiling:
        """A wave of tiles if there is no more, otherwise large ones, in stages that lie beside the result."""
        return Tiling(stages=3) if self.m > Tiling.m else Tiling(n=64)

    def _program(self, tiling: Tiling, blocks: int = 0) -> Callable[[], Any]:
        return lambda: product_allreduce(tilescale.init().size, self.m, self.n, self.k, tiling, blocks)

    def own(self, kernel: Any) -> Runner:
        """A program of ours."""
        (a, b), c = self.operands(), trials.nothing(self.m, self.n)
        call = returning(c, kernel, a[None], b, c)
        return checked(self.draw, trials.into(a, b), call, [c], kernel.synchronize)
