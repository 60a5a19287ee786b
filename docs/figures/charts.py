# SPDX-License-Identifier: MIT
"""Charts of measured times, from the committed results of `benchmarks/asynchrony.py` and `benchmarks/operators.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from docs.figures.style import Figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WORKS = {
    "ag_gemm": "all-gather and GEMM",
    "gemm_rs": "GEMM and reduce-scatter",
    "gemm_ar": "GEMM and all-reduce",
    "allreduce": "all-reduce",
    "put": "put",
    "small_put": "put of 4 KiB and wait",
    "product_allreduce": "GEMM and all-reduce",
    "grouped_experts": "experts",
    "gemm": "GEMM",
    "cluster_gemm": "GEMM by clusters",
    "mla_decode": "MLA decode",
    "plain_call": "call of an empty kernel",
    "sequence_attention": "attention, 16384 tokens",
    "experts": "tokens to experts and back",
    "all_to_all": "tokens to heads",
    "all_reduce_rms_norm": "all-reduce and norm",
}
"""A work of the results -> what it is."""

LABELS = {
    "tilescale, a block a tile": "tilescale, tile per block",
    "tilescale, warpgroups apart": "tilescale, warpgroups split",
    "tilescale direct": "tilescale, direct stores",
    "tilescale senders": "tilescale, sender blocks",
    "tilescale phases": "tilescale, sequential",
    "tilescale in order": "tilescale, sequential",
    "tilescale tma": "tilescale, TMA",
    "tilescale stores": "tilescale, stores",
    "a block a tile": "tile per block",
    "in turns": "persistent",
    "in turns, counted": "persistent, signal per tile",
}
"""A contender of the results -> what it is, where its name is not that."""

MODES = {"graph": "in a graph", "host": "host time"}

LEFT, LONGEST, STEP = 168, 182, 21
"""Where bars begin, how long the longest is, and the distance of two, in pixels."""

BESIDE, WHOLE = 172, 186
"""The same for shares: where bars begin, and how long 1 is."""

IN_TURN, PRODUCT = "nccl+cublas", "cublas alone"
"""Contenders of products: what ours are shares of, and what no overlap can be faster than with cuBLAS's kernel."""

MODELS = ("llama3_8b", "llama3_70b", "qwen3_32b", "deepseek_v3")
"""Whose layers were measured."""

Row = Mapping[str, Any]


def measured(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def chart(title: str, works: Sequence[str], name: str = "asynchrony") -> Figure:
    """A bar for each contender: the median time; a line from the fastest round to the slowest."""
    results = measured(name)
    rows = [row for row in results["rows"] if row["work"] in works]
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row["work"], row["shape"], row["mode"]))]
    height = sum(34 + STEP * len(group) for group in groups) + 26
    figure = Figure(title, 460, height)
    top = 4.0
    for group in groups:
        top = _group(figure, top, group)
    sign(figure, height, results)
    return figure


def sign(figure: Figure, height: float, results: Mapping[str, Any], said: str = "median of the rounds") -> None:
    """Write the machine, the date and the statistic of the results into the last line."""
    where = f"{results['machine']['gpu']}, {results['date'][:10]}; {said}"
    figure.text(452, height - 10, where, "soft", 11, "end")


def shares(title: str, works: Sequence[str], label: Callable[[Row], str]) -> Figure:
    """A bar for each shape: our time as a share of NCCL's and cuBLAS's, one after the other; a mark at cuBLAS alone."""
    results = measured("operators")
    rows = [row for work in works for row in results["rows"] if row["work"] == work and row["us"] is not None]
    rows.sort(key=lambda row: (works.index(row["work"]), row["dtype"], -row["shape"][0], row["shape"][1:], row["mode"]))
    groups = [list(group) for _, group in groupby(rows, lambda r: (r["work"], r["dtype"], r["shape"], r["mode"]))]
    height = STEP * len(groups) + 70
    figure = Figure(title, 460, height)
    figure.text(BESIDE, 12, "share of the time of NCCL and cuBLAS", "soft", 11, "start")
    for number, group in enumerate(groups):
        top, us = 26 + STEP * number, {row["contender"]: row["us"] for row in group}
        ours, alone = (us[name] / us[IN_TURN] for name in ("tilescale", PRODUCT))
        figure.text(BESIDE - 6, top + 8, label(group[0]), "", 11, "end")
        figure.box(BESIDE, top, WHOLE * ours, 16, "d0")
        figure.line((BESIDE + WHOLE * alone, top - 1), (BESIDE + WHOLE * alone, top + 17), kind="signal")
        figure.text(BESIDE + WHOLE + 10, top + 8, f"{ours:.2f}, {_us(us['tilescale'])}", "", 11, "start")
    bottom = 26 + STEP * len(groups)
    figure.line((BESIDE + WHOLE, 22), (BESIDE + WHOLE, bottom))
    figure.line((BESIDE, bottom + 14), (BESIDE + 18, bottom + 14), kind="signal")
    figure.text(BESIDE + 24, bottom + 14, "cuBLAS alone; the line at the right is 1", "soft", 11, "start")
    sign(figure, height, results, f"{results['machine']['gpus']} GPUs")
    return figure


def _us(us: float) -> str:
    """Microseconds, four digits or all before the point."""
    return f"{us:.0f} us" if us >= 1000 else f"{us:.4g} us"


def _rows(row: Row) -> str:
    """What tells the shapes of one product apart."""
    kind = ", float8" if row["dtype"].startswith("float8") else ""
    count = row["shape"][0]
    return f"{count} row{'s' * (count > 1)}{kind}{', in a graph' if row['mode'] == 'graph' else ''}"


def _layer(row: Row) -> str:
    """A layer of a model and its rows."""
    model, name = row["work"].split()
    return f"{model} {name}, {row['shape'][0]}"


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
        figure.text(LEFT - 6, top + 8, LABELS.get(row["contender"], row["contender"]), "", 11, "end")
        if row["us"] is None:
            figure.text(LEFT + 4, top + 8, "not timed: its check did not end", "signal", 11, "start")
        else:
            length = LONGEST * row["us"] / longest
            figure.box(LEFT, top, length, 16, "d0" if "tilescale" in row["contender"] else "unit")
            figure.line(*((LEFT + LONGEST * us / longest, top + 8) for us in row["spread"]))
            ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} x"
            figure.text(
                LEFT + LONGEST * row["spread"][1] / longest + 8, top + 8, f"{_us(row['us'])}{ratio}", "", 11, "start"
            )
        top += STEP
    return top + 8


def products() -> Figure:
    """GEMMs with communication, and cuBLAS and NCCL."""
    return chart("Measured times of GEMMs with communication", ("ag_gemm", "gemm_rs"))


def communication() -> Figure:
    """All-reduce and puts, beside NCCL, symm_mem and the copy engine."""
    return chart("Measured times of an all-reduce and of puts", ("allreduce", "put", "small_put"))


def one_gpu() -> Figure:
    """What runs on one GPU, beside cuBLAS and stock TileLang."""
    return chart("Measured times on one GPU", ("gemm", "cluster_gemm", "mla_decode", "plain_call"))


def products_with(work: str, name: str) -> Figure:
    """The operator of a product with a collective, over rows."""
    return shares(f"Measured times of the operator: product with {name}", (work,), _rows)


def attention() -> Figure:
    """Attention and decode, beside one GPU that has all keys."""
    return chart("Measured times of attention and decode", ("sequence_attention", "mla_decode"), "operators")


def exchanges() -> Figure:
    """Experts, and what else is an exchange or a sum, beside NCCL."""
    works = ("experts", "all_to_all", "all_reduce_rms_norm")
    return chart("Measured times of experts, of tokens to heads, and of an all-reduce and norm", works, "operators")


def layers(*names: str) -> Figure:
    """Layers of models that have these names."""
    works = [f"{model} {name}" for model in MODELS for name in names]
    return shares("Measured times of layers of models", works, _layer)


FIGURES = {
    "measured-products": products,
    "measured-communication": communication,
    "measured-one-gpu": one_gpu,
    "measured-gather": partial(products_with, "ag_gemm", "a gather"),
    "measured-scatter": partial(products_with, "gemm_rs", "a reduce-scatter"),
    "measured-sum": partial(products_with, "gemm_ar", "an all-reduce"),
    "measured-attention": attention,
    "measured-exchanges": exchanges,
    "measured-layers-in": partial(layers, "qkv", "gate_up"),
    "measured-layers-out": partial(layers, "o", "down"),
}
