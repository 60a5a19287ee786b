# SPDX-License-Identifier: MIT
"""All-reduces of up to 1024 devices by several algorithms, simulated: `python benchmarks/scaling.py`.

Writes the times to `benchmarks/results/` and draws docs/diagrams/allreduce-scaling.svg. The machines are built-in ones
with more or fewer units.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tilescale.collectives import estimate  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.hda.load import derive  # noqa: E402
from tilescale.hda.units import format_bytes  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
PICTURE = ROOT / "docs" / "diagrams" / "allreduce-scaling.svg"

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [4**n * KIB for n in range(1, 11)]
NODES = [1, 2, 4, 8, 16, 32, 64, 128]
SMALL, LARGE = 64 * KIB, 1 * GIB
MESH, MESH_SIZES = (32, 32), [2**n for n in range(6, 16)]

STYLE = {
    "ring": ("#000000", "o", "one ring"),
    "rings": ("#E69F00", "s", "rings, one a port"),
    "tree": ("#009E73", "^", "two trees"),
    "halving_doubling": ("#CC79A7", "D", "halving and doubling"),
    "recursive_doubling": ("#D55E00", "x", "recursive doubling"),
    "hierarchical": ("#56B4E9", "v", "inside, then across, by rings"),
    "hierarchical_doubling": ("#0072B2", "P", "inside, then across, by halving"),
}
"""Algorithm -> colour (Okabe and Ito, 2008), marker, the legend's words."""


@cache
def cluster(nodes: int) -> Machine:
    """Servers of 8 GPUs, each GPU with its own port to the fat tree."""
    return derive("h200-sxm-8x4", f"{nodes} x 8 H200", {"levels": {"node": {"count": nodes}}})


@cache
def mesh() -> Machine:
    """Part of the wafer, from a corner."""
    rows, columns = MESH
    changes = {"levels": {"core": {"count": rows * columns}}, "networks": {"fabric": {"dims": list(MESH)}}}
    return derive("wafer-mesh", f"mesh of {rows} x {columns} cores", changes)


def cases() -> Iterator[tuple[str, Machine, int]]:
    """(panel, machine, bytes) of every point."""
    yield from (("sizes", cluster(NODES[-1]), size) for size in SIZES)
    yield from (("mesh", mesh(), size) for size in MESH_SIZES)
    for nodes in NODES:
        yield "small", cluster(nodes), SMALL
        yield "large", cluster(nodes), LARGE


def simulate() -> list[dict[str, Any]]:
    """Simulate all points, each with its CPU time."""
    rows = []
    for panel, machine, nbytes in cases():
        level = machine.tensor_level.name
        for algorithm in STYLE:
            if panel == "mesh" and algorithm == "rings":
                continue  # a mesh has no groups that could share ports
            begin = perf_counter()
            found = estimate(machine, level, "allreduce", algorithm, nbytes)
            rows.append(
                {
                    "panel": panel, "machine": machine.name, "units": machine.count(level), "bytes": nbytes,
                    "algorithm": algorithm, "us": float(f"{found.seconds * 1e6:.5g}"), "rounds": found.rounds,
                    "links": len(found.links), "simulated_in_s": round(perf_counter() - begin, 3),
                }
            )  # fmt: skip
    return rows


# -- the picture -------------------------------------------------------------------------------------------------------

PANELS = {
    "sizes": (f"1024 GPUs, {NODES[-1]} servers of 8", "bytes", "tensor of each GPU"),
    "mesh": (f"1024 cores of a wafer, mesh of {MESH[0]} x {MESH[1]}", "bytes", "tensor of each core"),
    "small": (f"{format_bytes(SMALL)} on each GPU", "units", "GPUs"),
    "large": (f"{format_bytes(LARGE)} on each GPU", "units", "GPUs"),
}
"""Panel -> its title, its x axis, and the unit of that axis."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw four panels: time over size, and over the number of devices."""
    matplotlib.rcParams["svg.hashsalt"] = "tilescale"  # the same file for the same data
    figure = Figure(figsize=(11, 8), layout="constrained")
    for axes, (panel, (title, along, what)) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for algorithm, (colour, marker, words) in STYLE.items():
            mine = [row for row in rows if (row["panel"], row["algorithm"]) == (panel, algorithm)]
            if not mine:
                continue
            x, y = [row[along] for row in mine], [row["us"] for row in mine]
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.3, label=words)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(what)
        axes.set_ylabel("simulated time")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [row[along] for row in mine]
        axes.set_xticks(ticks, [format_bytes(n) if along == "bytes" else str(n) for n in ticks])
        axes.tick_params(axis="x", labelsize=8, labelrotation=30 if along == "bytes" else 0)
        show_times(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def show_times(axes: Axes) -> None:
    """Axes whose heights are microseconds, with a light grid."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))
    axes.grid(color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _time(us: float) -> str:
    return f"{us:g} us" if us < 1e3 else f"{us / 1e3:g} ms" if us < 1e6 else f"{us / 1e6:g} s"


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--draw-only", is_flag=True, help="Draw what was simulated before.")
def main(draw_only: bool) -> None:
    if not draw_only:
        RESULTS.write_text(json.dumps({"rows": simulate()}, indent=None).replace("}, {", "},\n {") + "\n")
    rows = json.loads(RESULTS.read_text())["rows"]
    draw(rows, PICTURE)
    slowest = max(rows, key=lambda row: row["simulated_in_s"])
    click.echo(f"{len(rows)} all-reduces; the longest took {slowest['simulated_in_s']} s: {slowest}")


if __name__ == "__main__":
    main()
