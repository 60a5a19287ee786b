# SPDX-License-Identifier: MIT
"""Measured times of operators as tables of Markdown, for pages of docs/notes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ALONE = "cublas alone"
GEMM = {
    "cuBLAS": ALONE,
    "NCCL + cuBLAS": "nccl+cublas",
    "symm_mem + cuBLAS": "symm_mem+cublas",
    "TileScale": "tilescale",
}
"""Column -> what the names of its contenders begin with."""


NORM = {
    "NCCL, norm": "nccl",
    "symm_mem, norm": "symm_mem",
    "all-reduce, norm": "tilescale, two kernels",
    "one kernel": "tilescale",
    "float8, scale per row": "tilescale, float8 per row",
    "per group": "tilescale, float8 per group",
    "packed": "tilescale, float8, packed scales",
    "with `out=`": "tilescale, out",
    "all-reduce alone": "tilescale, sum alone",
}
"""Column -> its contender; the last two are of eager calls."""


def tables() -> dict[str, str]:
    """GEMMs, and other operators, by name of the table."""
    rows = _rows("operators")
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


def norms() -> dict[str, str]:
    """All-reduce, residual and norm, by the mode of the calls."""
    made = {}
    for mode in ("graph", "eager"):
        rows = [row for row in _rows("fused_norm") if row["mode"] == mode]
        rows.sort(key=lambda row: (math.prod(row["shape"]), row["dtype"]))
        groups = [list(group) for _, group in groupby(rows, key=lambda row: (row["shape"], row["dtype"]))]
        present = {head: name for head, name in NORM.items() if any(row["contender"] == name for row in rows)}
        made[f"norms, {mode}"] = _table(["rows", *present], (_norm(group, present) for group in groups))
    return made


def _norm(group: list[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    times = {row["contender"]: f"{row['us']:.1f}" for row in group}
    return [" x ".join(map(str, group[0]["shape"])), *(times.get(name, "") for name in names.values())]


def _rows(name: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["us"] is not None]


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
