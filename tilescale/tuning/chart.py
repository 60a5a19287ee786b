# SPDX-License-Identifier: MIT
"""A picture of the rows of races: every contender's time through its baseline's, with the spread over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, OTHERS, LIMIT = "#0072B2", "#999999", "#D55E00"
"""Colours of ours, of other contenders, and of the line that says failed (Okabe and Ito, 2008)."""
ROW_INCHES, TITLE_INCHES = 0.24, 0.55

Row = Mapping[str, Any]


def heats(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by what their contenders did, in the file's order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        gpus = f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}"
        title = f"{row['work']} {' x '.join(map(str, row['shape']))} {row['dtype']}, {gpus}, {row['mode']}"
        found.setdefault(title, []).append(row)
    return found


def measure(row: Row, us: float) -> float:
    """The drawn value of a time: relative to the baseline's median, or microseconds where there is no baseline."""
    return us * row["ratio"] / row["us"] if row["ratio"] is not None else us


def bars(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """One bar for each contender, the fastest at the top, those that failed below."""
    timed = sorted((row for row in rows if row["us"] is not None), key=lambda row: row["us"])
    failed = [row for row in rows if row["us"] is None]
    baseline = next((row for row in timed if row["ratio"] is not None), None)
    for place, row in enumerate(timed):
        value, (low, high) = measure(row, row["us"]), (measure(row, us) for us in row["spread"])
        own = "tilescale" in row["contender"]
        axes.barh(place, value, color=OURS if own else OTHERS, height=0.7)
        axes.errorbar(value, place, xerr=[[value - low], [high - value]], color="black", capsize=2, linewidth=0.9)
        ratio = f"{row['ratio']:.3f} x, " if row["ratio"] is not None else ""
        axes.annotate(f"{ratio}{row['us']:.4g} us", (max(value, high), place), (6, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    for place, row in enumerate(failed, len(timed)):
        axes.annotate(f"failed: {reason(row)}", (0, place), (4, 0), textcoords="offset points", va="center",
                      fontsize=8, color=LIMIT)  # fmt: skip
    names = [row["contender"] for row in (*timed, *failed)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=7)
    largest = max((measure(row, row["spread"][1]) for row in timed), default=1.0)
    axes.set_xlim(0, 1.3 * largest)
    if baseline is not None:
        axes.axvline(1, color="black", linewidth=0.7, linestyle=":")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def reason(row: Row) -> str:
    """Why a contender has no time, in a few words."""
    text = row["failed"].splitlines()[0]
    return text if len(text) <= 90 else f"{text[:87]}..."


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a results file as the picture's ending says, .svg or .png."""
    groups = heats(results["rows"])
    heights = [TITLE_INCHES + ROW_INCHES * len(rows) for rows in groups.values()]
    figure = Figure(figsize=(9, 0.6 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, rows) in zip(panels, groups.items(), strict=True):
        bars(axes, title, rows)
    where = f"{results['machine']['gpus']} x {results['machine']['gpu']}, {results['date'][:10]}"
    what = "times through the baseline's of the same rounds (us where there is none)"
    figure.suptitle(f"{where}: {what}\nbars: medians; whiskers: the fastest and the slowest round", fontsize=9)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure: the same file for the same data."""
    matplotlib.rcParams["svg.hashsalt"] = "tilescale"
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=110)
