# SPDX-License-Identifier: MIT
"""Tables of measured times in Markdown, from the committed results of `benchmarks/`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from docs.figures.charts import LABELS, MODES, WORKS, Row, measured
from tilescale.hda.units import format_bytes

OVERLAPPED = ("ag_gemm", "gemm_rs", "product_allreduce", "grouped_experts")
"""Works that have GEMMs and communication."""

FORMS = ("a block a tile", "in turns", "in turns, counted", "clusters")

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1) -> str:
    """Markdown; all columns but the first `texts` are numbers."""
    heads = list(heads)
    rule = "|" + "---|" * texts + "---:|" * (len(heads) - texts)
    return "\n".join([f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def shape(row: Row) -> str:
    """The extents of a work."""
    return " x ".join(map(str, row["shape"]))


def overlapped() -> str:
    """GEMMs with communication on two GPUs, in microseconds, and their speedup over NCCL and cuBLAS."""
    rows = [row for work in OVERLAPPED for row in measured("asynchrony")["rows"] if row["work"] == work]
    lines = []
    for _, group in groupby(rows, lambda row: (row["work"], row["shape"])):
        of = {row["contender"]: row for row in group}
        us = {name: of[name]["us"] for name in ("tilescale", "nccl+cublas", "cublas alone")}
        speedup = us["nccl+cublas"] / us["tilescale"]
        name, times = WORKS[of["tilescale"]["work"]], (f"{each:.0f}" for each in us.values())
        lines.append([name, shape(of["tilescale"]), *times, f"{speedup:.2f} x"])
    return table(["", "shape", "TileScale", "NCCL, then cuBLAS", "cuBLAS alone", "speedup"], lines, 2)


def races() -> str:
    """All contenders of all works: the median, the fastest and the slowest round, and the ratio to the baseline."""
    lines = []
    for row in measured("asynchrony")["rows"]:
        what = [WORKS[row["work"]], shape(row), f"{row['gpus']}", MODES.get(row["mode"], row["mode"])]
        times = ["failed", "", ""]
        if row["us"] is not None:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
            times = [f"{row['us']:.1f}", "{:.1f} to {:.1f}".format(*row["spread"]), ratio]
        lines.append([*what, LABELS.get(row["contender"], row["contender"]), *times])
    return table(["work", "shape", "GPUs", "mode", "contender", "us", "rounds", "ratio"], lines, 5)


def forms() -> str:
    """Ratios of the forms of a GEMM to cuBLAS."""
    lines = []
    for (_, dtype), group in groupby(measured("products")["rows"], lambda row: (row["shape"], row["dtype"])):
        of = {row["contender"]: row for row in group}
        ratios = (f"{of[name]['ratio']:.2f}" for name in FORMS)
        lines.append([shape(of[FORMS[0]]), dtype.partition("_")[0], *ratios])
    return table(["M x N x K", "", *(LABELS.get(name, name) for name in FORMS)], lines, 2)


def experts() -> str:
    """A layer of experts over two GPUs, in microseconds; contenders that need the host have no graph."""
    lines = []
    for of in _layers("bfloat16"):
        ours = of["tilescale"]
        times = (f"{of[name]['us']:.0f}" if name in of else "" for name in ("tilescale", "operators", "torch"))
        lines.append(
            [
                ours["work"].removeprefix("experts "),
                f"{ours['shape'][0]}",
                MODES.get(ours["mode"], ours["mode"]),
                *times,
            ]
        )
    return table(["", "tokens of a rank", "mode", "`moe_layer`", "separate operators", "PyTorch"], lines, 3)


def float8_experts() -> str:
    """A layer of float8 experts over two GPUs, in microseconds, and its ratio to its grouped GEMMs."""
    lines = []
    for of in _layers("float8_e4m3fn"):
        ours, alone = of["tilescale"], of["grouped GEMMs alone"]
        mode = MODES.get(ours["mode"], ours["mode"])
        lines.append([f"{ours['shape'][0]}", mode, f"{ours['us']:.0f}", f"{alone['us']:.0f}", f"{ours['ratio']:.2f}"])
    return table(["tokens of a rank", "mode", "`moe_layer`", "its grouped GEMMs alone", "ratio"], lines, 2)


def _layers(dtype: str) -> Iterator[dict[str, Row]]:
    """The rows of each work of experts on the device, by contender."""

    def work(row: Row) -> tuple[str, list[int], str]:
        return row["work"], row["shape"], row["mode"]

    found = (row for row in measured("experts")["rows"] if row["dtype"] == dtype and row["mode"] != "host")
    rows = sorted(found, key=work)
    for _, group in groupby(rows, work):
        yield {row["contender"]: row for row in group}


def eager_collectives() -> str:
    """Eager calls of collectives: ours and NCCL's microseconds, and the median ratio of the rounds."""
    cells: dict[int, dict[str, str]] = {}
    rows = [row for row in measured("new_results")["rows"] if row["mode"] == "eager"]
    for (work, extents), group in groupby(rows, lambda row: (row["work"], row["shape"])):
        of = {row["contender"]: row for row in group}
        ours, nccl = of["tilescale"], of["nccl"]
        cell = f"{ours['us']:.1f} / {nccl['us']:.1f} ({ours['ratio']:.2f})"
        cells.setdefault(2 * extents[0] * extents[1], {})[work] = cell
    lines = ([format_bytes(size), *(of[name] for name in OPERATIONS)] for size, of in sorted(cells.items()))
    return table(["bytes of a rank", *(name.replace("_", "-") for name in OPERATIONS)], lines)
