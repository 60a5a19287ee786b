# SPDX-License-Identifier: MIT
"""Collectives, a GEMM and an exchange of experts on up to 1024 GPUs, simulated: `python benchmarks/many_nodes.py`.

Weak scaling: the work of a GPU is constant. Strong scaling: the work of all GPUs together is. Writes simulated times,
the CPU time of simulating them, and published results of real clusters with their simulation, to `benchmarks/results/`,
and draws docs/diagrams/many-nodes.svg and the tables of docs/many-nodes.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import click
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import expert_stages  # noqa: E402
import prediction_programs as programs  # noqa: E402 - in this folder
from predictions import is_close, with_tables  # noqa: E402
from scaling import show_times  # noqa: E402

import tilescale  # noqa: E402
from tilescale.collectives import estimate  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.hda.load import derive  # noqa: E402

REFERENCE = ROOT / "benchmarks" / "reference" / "clusters.json"
RESULTS = ROOT / "benchmarks" / "results" / "many_nodes.json"
PICTURE = ROOT / "docs" / "diagrams" / "many-nodes.svg"
PAGE = ROOT / "docs" / "many-nodes.md"

US, GB, GIB, MIB = 1e-6, 1e9, 1 << 30, 1 << 20
NODES, PER_NODE = [1, 2, 4, 8, 16, 32, 64, 128], 8
DEVICES = [PER_NODE * nodes for nodes in NODES]

TENSOR = 256 * MIB
"""Bytes of the all-reduce on each GPU: weak on all numbers of them, strong on the largest."""

ROWS, DEPTH, COLUMNS = 8192, 8192, 256
"""Sizes of the GEMM: gathered rows, columns of each GPU's weights; strong on the largest number of GPUs."""

TOKENS, TOKEN, EXPERTS = 128, 7392, 8
"""Of each GPU: tokens, bytes of one in FP8 with its scales (7168 values), and experts of each token."""

REASONS = {
    "deepgemm_layer": (
        "the estimate leaves out the routing tables, the quantization and the sums on a GPU, and has equally many "
        "tokens for each expert. How much of the difference each of these is was not measured."
    ),
    "deepep_low_latency": (
        "the kernels take about 30 us more at any number of GPUs: they convert tokens to FP8, count them, and wait for "
        "counts, which is most of the shortest row; and the experts are drawn, so some GPU gets more than its share."
    ),
}


@cache
def cluster(nodes: int) -> Machine:
    """Servers of 8 GPUs, each GPU with its own port to the fat tree."""
    return derive("h200-sxm-8x4", f"{nodes} x 8 H200", {"levels": {"node": {"count": nodes}}})


def collective(operation: str, algorithm: str, nodes: int, nbytes: float) -> float:
    """Simulated seconds of a collective."""
    return estimate(cluster(nodes), "device", operation, algorithm, nbytes).seconds


def gather_and_multiply(algorithm: str, nodes: int, columns: int) -> float:
    """Simulated seconds of a program that gathers the rows of all GPUs and multiplies them by the local weights."""
    with tilescale.use_machine(cluster(nodes)):
        program = programs.gathered_product(ROWS, columns, DEPTH, nodes * PER_NODE, algorithm)
        return tilescale.emulate(program, machine=cluster(nodes), data=False, progress=False).time_us * US


def share(nodes: int, scaling: str) -> int:
    """Ratio of a GPU's work in this cluster to its work in the largest one."""
    return 1 if scaling == "weak" else NODES[-1] // nodes


Workload = Callable[[str, int, int], float]
"""(algorithm, nodes, share) -> seconds."""

WORKLOADS: dict[str, tuple[str, tuple[str, ...], Workload]] = {
    "allreduce": (
        f"all-reduce, {TENSOR // MIB} MiB",
        ("ring", "rings", "hierarchical", "hierarchical_doubling"),
        lambda algorithm, nodes, times: collective("allreduce", algorithm, nodes, TENSOR * times),
    ),
    "ag_gemm": (
        f"all-gather, then {ROWS} x {COLUMNS} x {DEPTH}",
        ("ring", "rings", "hierarchical", "hierarchical_doubling"),
        lambda algorithm, nodes, times: gather_and_multiply(algorithm, nodes, COLUMNS * times),
    ),
    "moe": (
        f"all-to-all of {TOKENS} tokens to {EXPERTS} experts",
        ("pairwise", "direct", "hierarchical"),
        lambda algorithm, nodes, times: collective(
            "all_to_all", algorithm, nodes, TOKENS * EXPERTS * TOKEN * times
        ),
    ),
}  # fmt: skip
"""Name -> words, algorithms, and the function that simulates it."""


def simulate() -> list[dict[str, Any]]:
    """Simulate all points, each with its CPU time in seconds."""
    gather_and_multiply("ring", 1, COLUMNS)  # loading once is not part of a point's cost
    rows = []
    for workload, (_, algorithms, run) in WORKLOADS.items():
        for scaling in ("weak", "strong"):
            for algorithm in algorithms:
                for nodes in NODES:
                    begin = process_time()
                    seconds = run(algorithm, nodes, share(nodes, scaling))
                    rows.append(
                        {
                            "workload": workload, "scaling": scaling, "algorithm": algorithm,
                            "units": nodes * PER_NODE, "us": float(f"{seconds / US:.5g}"),
                            "simulated_in_s": round(process_time() - begin, 3),
                        }
                    )  # fmt: skip
    return rows


# -- what was published ------------------------------------------------------------------------------------------------


def bus_bandwidth(operation: str, nodes: int, nbytes: int) -> float:
    """Rate as nccl-tests counts it: the bytes that a ring would send over each link, per second."""
    units = nodes * PER_NODE
    factor = (2 if operation == "allreduce" else 1) * (units - 1) / units
    return factor * nbytes / collective(operation, "nccl", nodes, nbytes) / GB


def deepep_throughput(nodes: int, token: int) -> float:
    """Rate at which data leaves a GPU: a token goes to each node once, and over NVLink from there."""
    nbytes = 8192 * nodes * token
    return nbytes / collective("all_to_all", "direct", nodes, nbytes) / GB


PUBLISHED: dict[str, Callable[..., float]] = {
    "nccl_nodes": bus_bandwidth,
    "deepep_low_latency": lambda nodes, token: (
        collective("all_to_all", "direct", nodes, TOKENS * EXPERTS * token) / US
    ),
    "deepep_throughput": deepep_throughput,
    "deepgemm_layer": lambda tokens: expert_stages.layer(cluster(1), PER_NODE, tokens),
}  # fmt: skip
"""Group -> simulation of one of its rows, in the unit of the group."""


def compare(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group whose rows have simulated values and their errors."""
    rows = []
    for row in group["rows"]:
        value = PUBLISHED[group["name"]](**{k: v for k, v in row.items() if k not in ("what", "measured")})
        rows.append({**row, "simulated": float(f"{value:.4g}"), "off": round(value / row["measured"] - 1, 3)})
    return {**group, "rows": rows}


# -- page and picture --------------------------------------------------------------------------------------------------

STYLE = {
    "ring": ("#000000", "o", "flat: one ring"),
    "pairwise": ("#000000", "o", "flat: in turns"),
    "direct": ("#009E73", "^", "flat: all at once"),
    "rings": ("#E69F00", "s", "rings, one a port"),
    "hierarchical": ("#56B4E9", "v", "inside, then across"),
    "hierarchical_doubling": ("#0072B2", "P", "the same, by halving"),
}
"""Algorithm -> colour (Okabe and Ito, 2008), marker, the legend's words."""


def cost_table(rows: list[dict[str, Any]]) -> str:
    """CPU seconds of a point of weak scaling, the longest of each number of GPUs."""
    weak = [row for row in rows if row["scaling"] == "weak"]
    lines = ["| GPUs | " + " | ".join(words for words, _, _ in WORKLOADS.values()) + " |", "|---:|" + "---:|" * 3]
    for units in DEVICES:
        longest = [
            max(row["simulated_in_s"] for row in weak if (row["workload"], row["units"]) == (name, units))
            for name in WORKLOADS
        ]
        lines.append(f"| {units} | " + " | ".join(f"{seconds:.2f}" for seconds in longest) + " |")
    return "\n".join(lines)


def with_results(page: str, results: dict[str, Any]) -> str:
    """Write the tables of the page again."""
    begin, end = "<!-- cost -->", "<!-- end cost -->"
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return with_tables(f"{head}{begin}\n\n{cost_table(results['rows'])}\n\n{end}{tail}", results, REASONS)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a column for each workload, weak above strong scaling."""
    matplotlib.rcParams["svg.hashsalt"] = "tilescale"  # the same file for the same data
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, len(WORKLOADS))
    handles: dict[str, Any] = {}
    for column, (name, (words, algorithms, _)) in enumerate(WORKLOADS.items()):
        for line, scaling in enumerate(("weak", "strong")):
            axes = panels[line][column]
            where = "on each GPU" if scaling == "weak" else f"on each of {DEVICES[-1]}, more on fewer"
            axes.set_title(f"{words}\n{where}", fontsize=9)
            for algorithm in algorithms:
                wanted = (name, scaling, algorithm)
                mine = [row for row in rows if (row["workload"], row["scaling"], row["algorithm"]) == wanted]
                colour, marker, legend = STYLE[algorithm]
                (handles[legend],) = axes.plot(
                    [row["units"] for row in mine], [row["us"] for row in mine],
                    color=colour, marker=marker, markersize=4, linewidth=1.3,
                )  # fmt: skip
            _dress(axes)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _dress(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(DEVICES, [str(units) for units in DEVICES])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPUs")
    show_times(axes)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--draw-only", is_flag=True, help="Draw and write the page from what was simulated before.")
def main(draw_only: bool) -> None:
    if not draw_only:
        groups = [compare(group) for group in json.loads(REFERENCE.read_text())["groups"]]
        results = {"groups": groups, "rows": simulate()}
        RESULTS.write_text(json.dumps(results).replace("}, {", "},\n {") + "\n")
    results = json.loads(RESULTS.read_text())
    draw(results["rows"], PICTURE)
    PAGE.write_text(with_results(PAGE.read_text(), results))
    for group in results["groups"]:
        for row in group["rows"]:
            click.echo(f"{row['what']:<40} {row['measured']:>8g} {row['simulated']:>8g} {row['off']:>+7.1%}")
        if not all(map(is_close, group["rows"])) and group["name"] not in REASONS:
            raise click.ClickException(f"{group['title']}: off by more than a quarter, and nothing says why")
    click.echo(f"{sum(row['simulated_in_s'] for row in results['rows']):.1f} s of one processor for all")


if __name__ == "__main__":
    main()
