# SPDX-License-Identifier: MIT
"""Operators by both strategies, overlapped and in phases, and cuBLAS alone.

    torchrun --nproc-per-node 2 benchmarks/ways.py

Shapes are near the point where one strategy becomes faster than the other. The operators choose by the machine model; a
test compares their choice with the times measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import fused  # noqa: E402 - found through the path above
import strategies  # noqa: E402
from suite import Suite, command  # noqa: E402

from tilescale.tuning.race import Contender, Heat  # noqa: E402

WORKS = {"ag_gemm": fused.Gathered, "gated": fused.Gated, "gemm_rs": fused.Scattered, "gemm_ar": fused.Summed}

SHAPES = {
    "ag_gemm": [(512, 3584, 8192), (1024, 3584, 8192), (2048, 3584, 8192), (2048, 3072, 4096)]
    + [(4096, 3072, 4096), (4096, 12288, 1536)],
    "gated": [(256, 25600, 5120), (256, 28672, 8192), (512, 14336, 4096), (1024, 14336, 4096)],
    "gemm_rs": [(256, 8192, 14336), (512, 8192, 3584), (1024, 8192, 3584), (1024, 4096, 7168), (4096, 4096, 2048)],
    "gemm_ar": [(16, 8192, 3584), (64, 8192, 3584), (128, 8192, 3584), (256, 8192, 3584), (1024, 8192, 3584)]
    + [(2048, 8192, 3584), (4096, 8192, 3584), (2048, 4096, 7168), (4096, 4096, 2048)],
}
"""M x N x K: of all GPUs together, N of each for gathers, K of each for sums."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    if gpus == 1 or quick:
        return
    for name, shapes in SHAPES.items():
        for shape in shapes:
            work = WORKS[name](*shape)
            alone = Contender("cublas alone", work.contenders()[0].make)
            entries = [alone, *(strategies.contender(way, work.operator) for way in strategies.STRATEGIES)]
            yield fused.contest(name, shape, gpus, "graph", entries)


if __name__ == "__main__":
    command(Suite(SCRIPT, heats), __doc__)()
