# SPDX-License-Identifier: MIT
"""Tables of measured times in Markdown, from the committed results of `benchmarks/`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from docs.figures import distributions
from docs.figures.charts import LABELS, MODES, WORKS, Row, measured
from tilescale.hda.units import format_bytes

FIRST = [
    ("operators", "ag_gemm", [4096, 3584, 8192], "eager"),
    ("operators", "gemm_rs", [8192, 8192, 3584], "eager"),
    ("operators", "gemm_ar", [1024, 8192, 3584], "graph"),
    ("collectives", "allreduce", [1048576], "graph"),
]
MORE = [
    ("operators", "ag_gemm", [128, 3584, 8192], "graph"),
    ("operators", "gemm_rs", [128, 8192, 3584], "graph"),
    ("operators", "gemm_ar", [128, 8192, 3584], "graph"),
]
"""Rows of the tables of operators: results, work, shape, mode."""

CONTENDERS = {
    "TileScale": "tilescale",
    "GEMM alone (cuBLAS)": "cublas alone",
    "NCCL, then cuBLAS": "nccl",
    "symm_mem, then cuBLAS": "symm_mem",
}
"""Column of these tables -> first words of its contenders."""
OURS, NCCL = (list(CONTENDERS).index(name) for name in ("TileScale", "NCCL, then cuBLAS"))

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


def first_screen() -> str:
    """Operators of the README: the first rows of `operators`."""
    return _operators(FIRST)


def operators() -> str:
    """GEMMs with communication, and an all-reduce, on two GPUs."""
    return _operators(FIRST + MORE)


def _operators(rows: Iterable[tuple[str, str, list[int], str]]) -> str:
    """Microseconds of the fastest contender of each column, and the speedup over NCCL and cuBLAS."""
    lines = []
    for name, work, extents, mode in rows:
        form = {"work": work, "shape": extents, "dtype": "bfloat16", "mode": mode}
        times = {row["contender"]: row["us"] for row in measured(name)["rows"] if form.items() <= row.items()}
        us = [min((times[one] for one in times if one.startswith(each)), default=None) for each in CONTENDERS.values()]
        size = " x ".join(map(str, extents)) if len(extents) > 1 else f"{extents[0]} elements"
        label = f"{WORKS[work]}, {size}{', CUDA graph' if mode == 'graph' else ''}"
        cells = ("" if time is None else f"{time:.3g}" for time in us)
        lines.append([label, *cells, f"{us[NCCL] / us[OURS]:.2f}"])
    return table(["", *CONTENDERS, "speedup over NCCL"], lines)


def random_shapes() -> str:
    """Ratios of times at random shapes, the median and the largest, and how many are lost to the faster contender."""
    of_each = [distributions.ratios([name]) for name in distributions.OTHERS]
    lines = []
    for (work, dtype, mode), best in distributions.ratios().items():
        every = [of.get((work, dtype, mode)) for of in of_each]
        cells = [f"{statistics.median(each):.2f} ({each[-1]:.2f})" if each else "" for each in every]
        lost = sum(ratio > distributions.NEAR for ratio in best)
        lines.append([WORKS[work], dtype.partition("_")[0], MODES.get(mode, mode), *cells, f"{lost} of {len(best)}"])
    return table(["", "", "mode", "over NCCL + cuBLAS", "over symm_mem", "over 1.03 of the faster one"], lines, 3)


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
    rows = [row for row in measured("products")["rows"] if row["work"] == "product_form"]
    for (_, dtype), group in groupby(rows, lambda row: (row["shape"], row["dtype"])):
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
    return _collectives("eager", OPERATIONS, "nccl", lambda of: of["tilescale"]["ratio"])


HOST_WORKS = {
    "a function in Python": "a function in Python",
    "a product": "GEMM",
    "all_reduce": "all-reduce of 64 KiB",
    "all_gather_matmul": "all-gather and GEMM",
    "matmul_reduce_scatter": "GEMM and reduce-scatter",
    "matmul_all_reduce": "GEMM and all-reduce",
}
HOST_MODES = {"without gradients": "", "forward": " forward", "backward": " backward", "of 20": " backward of all"}


def host_times() -> str:
    """Microseconds of a call on the host: ours, and PyTorch's; its own works have one number."""
    found = {(row["work"], *row["shape"], row["contender"]): row["us"] for row in measured("host_time")["rows"]}
    lines = []
    for work, *extents in dict.fromkeys(key[:-1] for key in found if key[0] in HOST_WORKS):
        rows = f", {extents[0]} rows" if len(extents) > 2 else ""
        cells = []
        for mode in HOST_MODES.values():
            both = (found.get((work + mode, *extents, name)) for name in ("tilescale", "pytorch"))
            cells.append(" / ".join(f"{us:.0f}" for us in both if us is not None))
        lines.append([HOST_WORKS[work] + rows, *cells])
    return table(["", *HOST_MODES], lines)


def float8_collectives() -> str:
    """Collectives in CUDA graphs: microseconds of bfloat16 and of float8, and the times' ratio."""
    narrow = "tilescale, float8 on the wire"
    return _collectives("graph", OPERATIONS[:3], narrow, lambda of: of["tilescale"]["us"] / of[narrow]["us"])


def _collectives(mode: str, names: Sequence[str], other: str, ratio: Callable[[dict[str, Row]], float]) -> str:
    """Collectives with new results, of the sizes that another contender has, too: our time, its time, and the ratio."""
    cells: dict[int, dict[str, str]] = {}
    rows = [row for row in measured("new_results")["rows"] if row["mode"] == mode]
    for (work, extents), group in groupby(rows, lambda row: (row["work"], row["shape"])):
        of = {row["contender"]: row for row in group}
        if other in of:
            cell = f"{of['tilescale']['us']:.1f} / {of[other]['us']:.1f} ({ratio(of):.2f})"
            cells.setdefault(2 * extents[0] * extents[1], {})[work] = cell
    lines = ([format_bytes(size), *(of[name] for name in names)] for size, of in sorted(cells.items()))
    return table(["bytes of a rank", *(name.replace("_", "-") for name in names)], lines)


def simulated_layers() -> str:
    """A decode step as one launch and in order, simulated: a row for each machine and number of sequences."""
    rows = measured("persistent_simulated")["rows"]
    works = groupby(rows, lambda row: (row["machine"], row["work"], row["units"], row["batch"]))
    lines = []
    for (machine, work, units, batch), mine in works:
        by = {row["contender"]: f"{row['us']:.1f} us ({row['ratio']:.2f})" for row in mine}
        reading, *ours = ("weights read once", "one launch", "in order")
        times = [by[reading].partition(" (")[0], *(by.get(name, "-") for name in ours)]
        lines.append([f"{machine}, {units} units, {work}", str(batch), *times])
    return table(["", "sequences", "weights read once", "one launch", "in order"], lines)
