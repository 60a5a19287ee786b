# SPDX-License-Identifier: MIT
"""Measured times of operators as tables of Markdown, for docs/notes/operators-measured.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "operators.json"
ALONE = "cublas alone"
GEMM = {
    "cuBLAS": ALONE,
    "NCCL + cuBLAS": "nccl+cublas",
    "symm_mem + cuBLAS": "symm_mem+cublas",
    "TileScale": "tilescale",
}
"""Column -> what the names of its contenders begin with."""


def tables() -> dict[str, str]:
    """GEMMs, and other operators, by name of the table."""
    rows = [row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if row["us"] is not None]
    rows.sort(key=lambda row: (*_work(row), row["dtype"], row["mode"], [-n for n in row["shape"]]))
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (*_work(row), *_titles(row)))]
    gemms = [group for group in groups if group[0]["baseline"] == ALONE]
    heads = ["operator", "shape", "mode"]
    return {
        "GEMMs": _table([*heads, *GEMM, "ratio to cuBLAS"], map(_gemm, gemms)),
        "other operators": _table(
            [*heads, "baseline", "TileScale"], (_other(group) for group in groups if group not in gemms)
        ),
    }


def _work(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (" " in row["work"], row["work"])


def _titles(row: Mapping[str, Any]) -> list[str]:
    kind = "" if row["dtype"] == "bfloat16" else " float8"
    return [f"`{row['work']}`{kind}", " x ".join(map(str, row["shape"])), row["mode"]]


def _gemm(group: list[Mapping[str, Any]]) -> list[str]:
    """The fastest contender of each column."""
    times = [min((r["us"] for r in group if r["contender"].startswith(name)), default=None) for name in GEMM.values()]
    cells = ["" if us is None else f"{us:.1f}" for us in times]
    (ratio,) = (row["ratio"] for row in group if row["contender"] == GEMM["TileScale"])
    return [*_titles(group[0]), *cells, f"{ratio:.2f}"]


def _other(group: list[Mapping[str, Any]]) -> list[str]:
    """Ratios are to the baseline of the same run."""
    ours = [row for row in group if row["contender"].startswith("tilescale")]
    others = [f"{row['contender']}: {row['us']:.1f}" for row in group if row not in ours]
    variants = (
        f"{r['contender'].removeprefix('tilescale').strip(' ,')} {r['us']:.1f} ({r['ratio']:.2f})" for r in ours
    )
    return [*_titles(group[0]), "; ".join(others), "; ".join(map(str.strip, variants))]


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))
