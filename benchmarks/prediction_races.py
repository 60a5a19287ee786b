# SPDX-License-Identifier: MIT
"""Raced programs, with the parameters of the races: `benchmarks/predictions.py` simulates them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
BLOCKS, CHUNK_ROWS = 132, 512
"""Blocks of persistent grids, and rows of a chunk, as in the races."""


def program(work: str, shape: list[int], devices: int, form: str) -> Any:
    """A program by its race, the race's shape, the number of devices, and the raced form."""
    for folder in (BENCHMARKS / "works", BENCHMARKS.parent / "examples" / "distributed"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return RACED[work, form](devices, *shape)


def form(name: str, dtype: str, m: int, n: int, k: int) -> tuple[Any, list[Any]]:
    """A GEMM of one device in a form that `benchmarks/products.py` has raced, and its arguments, without data."""
    import torch

    sys.path[:0] = [str(BENCHMARKS / "works")]
    works = importlib.import_module("product_forms")
    program = (works.forms(m, n, k, dtype) | works.tiled(m, n, k, dtype))[name]()
    buffers = [program.buffer_map[parameter] for parameter in program.params]
    extents = [[n if isinstance(n, int) else getattr(n, "value", m) for n in buffer.shape] for buffer in buffers]
    types = [getattr(torch, str(buffer.dtype)) for buffer in buffers]
    return program, [torch.empty(s, dtype=t, device="meta") for s, t in zip(extents, types, strict=True)]


def _tiling(**changed: int) -> Any:
    return importlib.import_module("programs").Tiling(**changed)


def _overlapped(name: str) -> Callable[..., Any]:
    """A GEMM and a collective in phases. 4096 rows of 3584 columns leave fewer blocks idle with narrower tiles."""

    def make(devices: int, m: int, n: int, k: int) -> Any:
        wide = 224 if (name, m, n) == ("ag_gemm_queue", 4096, 3584) else 256
        made = getattr(importlib.import_module("programs"), name)
        return made(devices, m, n, k, _tiling(n=wide, stages=3), CHUNK_ROWS, BLOCKS)

    return make


def _summed(devices: int, m: int, n: int, k: int) -> Any:
    """A GEMM whose tiles are summed: few rows in one wave of narrow tiles, others by a persistent grid."""
    make = importlib.import_module("tile_programs").product_allreduce
    if m == 128:
        return make(devices, m, n, k, _tiling(n=64, k=128))
    large = m // 128 * (n // 256) / BLOCKS > 2
    return make(devices, m, n, k, _tiling(stages=3) if large else _tiling(n=128, stages=5), BLOCKS)


def _experts(devices: int, experts: int, rows: int, hidden: int, inner: int) -> Any:
    make = importlib.import_module("24_grouped_experts").with_capacity
    return make(devices, experts, rows, hidden, inner, tile=(128, 256, 64), stages=4, threads=256)


def _decode(devices: int, batch: int, heads: int, keys: int) -> Any:
    return importlib.import_module("09_cp_flash_mla").cp_mla(devices, batch, heads, keys, 512, 64, splits=2)


def _clusters(devices: int, m: int, n: int, k: int) -> Any:
    make = importlib.import_module("10_cluster_gemm").cluster_gemm
    return make(devices, m, n, k, tile=(256, 256, 64), stages=4, dtype="bfloat16")


def _compiled_experts(*shape: int) -> Any:
    import tilescale

    return tilescale.compile(_experts(*shape)).ir


RACED: dict[tuple[str, str], Callable[..., Any]] = {
    ("cluster_gemm", "tilescale"): _clusters,
    ("mla_decode", "tilescale"): _decode,
    ("product_allreduce", "tilescale"): _summed,
    ("ag_gemm", "tilescale"): _overlapped("ag_gemm_queue"),
    ("gemm_rs", "tilescale"): _overlapped("gemm_rs_queue"),
    ("grouped_experts", "tilescale"): _compiled_experts,
    ("grouped_experts", "tilescale in order"): _experts,
}
"""Work and form, as named in the results -> the program for a number of devices and a shape."""

TITLES: dict[tuple[str, str], str] = {
    ("cluster_gemm", "tilescale"): "10, GEMM by clusters",
    ("mla_decode", "tilescale"): "09, MLA decode",
    ("product_allreduce", "tilescale"): "GEMM and all-reduce of tiles",
    ("ag_gemm", "tilescale"): "all-gather and GEMM, overlapped",
    ("gemm_rs", "tilescale"): "GEMM and reduce-scatter, overlapped",
    ("grouped_experts", "tilescale"): "24, experts, overlapped",
    ("grouped_experts", "tilescale in order"): "24, experts, sequential",
}
"""Description of a work and form."""
