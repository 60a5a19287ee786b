# SPDX-License-Identifier: MIT
"""Measured times of collectives as tables of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
SYSTEMS = ("tilescale", "nccl", "symm_mem")
LINK = 128 << 20, {"broadcast": 1, "all_gather": 2, "all_to_all": 2, "reduce_scatter": 2}
"""Size of which the rate is compared with the link's, and the parts of which two ranks send one each."""


WINDOWS = {
    "NCCL": "nccl",
    "NCCL, windows": "nccl, windows",
    "NCCL, copy engines": "nccl, windows, copy engines",
    "TileScale": "tilescale",
}
"""Column -> its contender."""

GRID = {
    "8 B to 1 KiB": range(8, 1 << 11),
    "2 KiB to 1 MiB": range(1 << 11, 1 << 21),
    "2 to 8 MiB": range(1 << 21, 1 << 24),
    "16 to 128 MiB": range(1 << 24, 1 << 28),
}
"""Column -> its bytes of whole tensors."""

VERSIONS = {"PyTorch": "torch", "NCCL": "nccl", "CUDA": "cuda", "TileScale": "tilescale"}
"""Column -> its name in a file of results."""


def times() -> dict[tuple[str, int, str], float]:
    """Work, bytes, system -> microseconds in a graph, of its fastest algorithm."""
    best: dict[tuple[str, int, str], float] = {}
    for row in _results()["rows"]:
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
    (copy,) = (row["gb_s"] for row in _results()["rows"] if row["work"] == "put")
    shares = {work: size / count / us[work, size, "tilescale"] / 1e3 / copy for work, count in parts.items()}
    return table(["collective of 128 MiB", "share"], [[f"`{work}`", f"{share:.3f}"] for work, share in shares.items()])


def windows() -> str:
    """NCCL with registered memory, by collective and size."""
    rows = [row for row in _results("nccl_windows")["rows"] if row["us"] is not None and row["work"] != "put"]
    us = {(row["work"], 2 * row["shape"][0], row["contender"]): row["us"] for row in rows}
    present = {head: name for head, name in WINDOWS.items() if any(row["contender"] == name for row in rows)}
    cells = [
        [f"`{work}`", size, *(_cell(us.get((work, nbytes, name))) for name in present.values())]
        for work in dict.fromkeys(work for work, _, _ in us)
        for size, nbytes in SIZES.items()
    ]
    return table(["collective", "size", *present], cells)


def grid() -> str:
    """The sizes of nccl-tests: time of TileScale relative to NCCL's, by collective; the worst of each range."""
    us = {
        (row["work"], 2 * row["shape"][0], row["contender"]): row["us"]
        for row in _results("nccl_tests")["rows"] if row["work"] != "put"
    }  # fmt: skip
    rows = []
    for work in dict.fromkeys(work for work, _, _ in us):
        ratios = {size: us[work, size, "tilescale"] / us[work, size, "nccl"] for w, size, _ in us if w == work}
        worst = (max(ratio for size, ratio in ratios.items() if size in sizes) for sizes in GRID.values())
        rows.append([f"`{work}`", *(f"{ratio:.2f}" for ratio in worst)])
    return table(["collective", *GRID], rows)


def kraken() -> str:
    """The shapes of kraken's benchmarks: range of the time of TileScale relative to others', by work and mode."""
    us = {
        (row["work"], row["mode"], *row["shape"], row["contender"].removesuffix("+cublas")): row["us"]
        for row in _results("kraken_shapes")["rows"] if row["us"] is not None
    }  # fmt: skip
    rows = []
    for work, mode in dict.fromkeys(key[:2] for key in us):
        ratios = [
            [us[(*key[:-1], "tilescale")] / us[key] for key in us if (*key[:2], key[-1]) == (work, mode, other)]
            for other in ("kraken", "nccl")
        ]
        rows.append([f"`{work}`", mode, *(f"{min(r):.2f} to {max(r):.2f}" if r else "" for r in ratios)])
    return table(["work", "mode", "over kraken", "over NCCL"], rows)


def _cell(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def versions() -> str:
    """Versions of the libraries, by file of results."""
    files = {"this table": "collectives", "NCCL's registered windows": "nccl_windows"}
    files |= {"sizes of nccl-tests": "nccl_tests", "shapes of kraken": "kraken_shapes"}
    found = {what: _results(name)["versions"] for what, name in files.items()}
    rows = [[what, *(of[name].split("+")[0] for name in VERSIONS.values())] for what, of in found.items()]
    return table(["times", *VERSIONS], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def _results(name: str = "collectives") -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
