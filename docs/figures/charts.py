# SPDX-License-Identifier: MIT
"""Charts of measured times, from the committed results of `benchmarks/asynchrony.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from docs.figures.style import Figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "asynchrony.json"
WORKS = {
    "ag_gemm": "all-gather and GEMM",
    "gemm_rs": "GEMM and reduce-scatter",
    "allreduce": "all-reduce",
    "put": "put",
    "small_put": "put of 4 KiB and wait",
    "gemm": "GEMM",
    "cluster_gemm": "GEMM by clusters",
    "mla_decode": "MLA decode",
    "plain_call": "a call without work",
}
"""A work of the results -> what it is."""

MODES = {"graph": "in a graph", "host": "time of the host"}

LEFT, LONGEST, STEP = 150, 200, 21
"""Where bars begin, how long the longest is, and the distance of two, in pixels."""

Row = Mapping[str, Any]


def chart(title: str, works: Sequence[str]) -> Figure:
    """A bar for each contender: the median time; a line from the fastest round to the slowest."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [row for row in results["rows"] if row["work"] in works]
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row["work"], row["shape"], row["mode"]))]
    height = sum(34 + STEP * len(group) for group in groups) + 26
    figure = Figure(title, 460, height)
    top = 4.0
    for group in groups:
        top = _group(figure, top, group)
    where = f"{results['machine']['gpu']}, {results['date'][:10]}; median of the rounds"
    figure.text(452, height - 10, where, "soft", 11, "end")
    return figure


def _group(figure: Figure, top: float, rows: Sequence[Row]) -> float:
    """Draw the contenders of one work; returns where the next one goes."""
    first = rows[0]
    shape = " x ".join(map(str, first["shape"]))
    gpus = f"{first['gpus']} GPU{'s' if first['gpus'] > 1 else ''}"
    figure.text(6, top + 12, WORKS[first["work"]], "bold", 13, "start")
    mode = "" if first["mode"] == "eager" else f", {MODES[first['mode']]}"
    figure.text(452, top + 12, f"{shape}, {gpus}{mode}", "soft", 11, "end")
    longest = max(row["spread"][1] for row in rows if row["us"] is not None)
    top += 26
    for row in rows:
        figure.text(LEFT - 6, top + 8, row["contender"], "", 11, "end")
        if row["us"] is None:
            figure.text(LEFT + 4, top + 8, "not timed: its check did not end", "signal", 11, "start")
        else:
            length = LONGEST * row["us"] / longest
            figure.box(LEFT, top, length, 16, "d0" if "tilescale" in row["contender"] else "unit")
            figure.line(*((LEFT + LONGEST * us / longest, top + 8) for us in row["spread"]))
            ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} x"
            figure.text(
                LEFT + LONGEST * row["spread"][1] / longest + 8, top + 8, f"{row['us']:.4g} us{ratio}", "", 11, "start"
            )
        top += STEP
    return top + 8


def products() -> Figure:
    """Products with communication, beside cuBLAS and NCCL."""
    return chart("Measured times of products with communication", ("ag_gemm", "gemm_rs"))


def communication() -> Figure:
    """All-reduce and puts, beside NCCL, symm_mem and the copy engine."""
    return chart("Measured times of an all-reduce and of puts", ("allreduce", "put", "small_put"))


def one_gpu() -> Figure:
    """What runs on one GPU, beside cuBLAS and stock TileLang."""
    return chart("Measured times on one GPU", ("gemm", "cluster_gemm", "mla_decode", "plain_call"))


FIGURES = {"measured-products": products, "measured-communication": communication, "measured-one-gpu": one_gpu}
