# SPDX-License-Identifier: MIT
"""Measured times of collectives as tables of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "collectives.json"
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
SYSTEMS = ("tilescale", "nccl", "symm_mem")
LINK = 128 << 20, {"broadcast": 1, "all_gather": 2, "all_to_all": 2, "reduce_scatter": 2}
"""Size of which the rate is compared with the link's, and the parts of which two ranks send one each."""


def times() -> dict[tuple[str, int, str], float]:
    """Work, bytes, system -> microseconds in a graph, of its fastest algorithm."""
    best: dict[tuple[str, int, str], float] = {}
    for row in _rows():
        if row["mode"] == "graph" and row["us"] is not None:
            key = row["work"], 2 * row["shape"][0], row["contender"].split()[0]
            best[key] = min(row["us"], best.get(key, row["us"]))
    return best


def measured() -> str:
    """Collective and system by size."""
    us = times()
    works = dict.fromkeys(work for work, _, _ in us)
    pairs = [(work, system) for work in works for system in SYSTEMS if (work, 1 << 20, system) in us]
    rows = [
        [f"`{work}`", system, *(f"{us[work, size, system]:.1f}" for size in SIZES.values())] for work, system in pairs
    ]
    return table(["collective", "system", *SIZES], rows)


def link() -> str:
    """The rate of large collectives as a share of a large copy's."""
    us, (size, parts) = times(), LINK
    (copy,) = (row["gb_s"] for row in _rows() if row["work"] == "put")
    shares = {work: size / count / us[work, size, "tilescale"] / 1e3 / copy for work, count in parts.items()}
    return table(["collective of 128 MiB", "share"], [[f"`{work}`", f"{share:.3f}"] for work, share in shares.items()])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def _rows() -> list[dict]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
