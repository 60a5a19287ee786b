# SPDX-License-Identifier: MIT
"""A picture of collectives over the size of their tensors: a line for each system, and the limit of the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tilescale.hda.units import format_bytes
from tilescale.tuning.chart import LIMIT, OTHERS, OURS, save

COLOURS = {"tilescale": OURS, "nccl": OTHERS, "symm_mem": "#009E73"}
"""System -> the colour of its line (Okabe and Ito, 2008). Its contenders' names begin with its own."""
COLUMNS = 3
"""Panels side by side, at most."""

PEAK = "put"
"""The work whose fastest contender measures the link's bandwidth."""

Row = Mapping[str, Any]
Point = tuple[float, float]


def bytes_of(row: Row) -> int:
    """Bytes of the tensor, of bfloat16."""
    return 2 * row["shape"][0]


def best(rows: Sequence[Row], system: str) -> list[Point]:
    """Bytes and microseconds of a system: of several contenders, the fastest at each size."""
    times: dict[int, float] = {}
    for row in rows:
        if row["contender"].split()[0] == system and row["us"] is not None:
            times[bytes_of(row)] = min(row["us"], times.get(bytes_of(row), row["us"]))
    return sorted(times.items())


def limit(rows: Sequence[Row], peak: float) -> list[Point]:
    """Time of sending alone: the bytes that each GPU has to send, at the link's `peak` in GB/s."""
    times = {bytes_of(row): row["gb_s"] * row["us"] / peak for row in rows if "gb_s" in row}
    return sorted(times.items())


def peak_of(rows: Sequence[Row]) -> float | None:
    """The fastest rate at which a GPU sends, GB/s; None if there are no measurements of it."""
    return max((row["gb_s"] for row in rows if row["work"] == PEAK and "gb_s" in row), default=None)


def panel(axes: Axes, title: str, rows: Sequence[Row], peak: float | None) -> None:
    """One collective in one mode."""
    for system, colour in COLOURS.items():
        points = best(rows, system)
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=".", markersize=4, linewidth=1.2, label=system)
    if peak is not None:
        wire = zip(*limit(rows, peak), strict=True)
        axes.plot(*wire, color=LIMIT, linewidth=0.9, linestyle="--", label=f"wire, {peak:.0f} GB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)
    exponents = range(12, 30, 4)
    axes.set_xticks([1 << n for n in exponents], [format_bytes(1 << n) for n in exponents], fontsize=9)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a results file as the picture's ending says, .svg or .png."""
    rows, peak = results["rows"], peak_of(results["rows"])
    heats = list(dict.fromkeys((row["work"], row["mode"]) for row in rows if row["work"] != PEAK))
    columns = min(len(heats), COLUMNS)
    lines = -(-len(heats) // columns)
    figure = Figure(figsize=(3.6 * columns, 0.7 + 2.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for (work, mode), axes in zip(heats, panels, strict=False):
        panel(axes, f"{work}, {mode}", [row for row in rows if (row["work"], row["mode"]) == (work, mode)], peak)
    for axes in panels[len(heats) :]:
        axes.set_visible(False)
    panels[0].legend(fontsize=9, frameon=False)
    where = f"{results['machine']['gpus']} x {results['machine']['gpu']}, {results['date'][:10]}"
    figure.suptitle(f"{where}\nmicroseconds over the bytes of the tensor, bfloat16", fontsize=10)
    save(figure, path)

