# SPDX-License-Identifier: MIT
"""Simulated over measured times, from the committed results of `benchmarks/predictions.py`."""

from __future__ import annotations

import math

from docs.figures.charts import measured
from docs.figures.style import Figure

PANELS = {
    "GEMMs": ("gemm", "forms", "examples"),
    "collectives": ("collectives", "allreduce_nccl", "allreduce_one_shot", "allreduce_two_shot", "nccl_stream"),
    "GEMM, then NCCL": ("sequence",),
    "whole programs": ("fused", "races"),
}
"""Title of a panel -> the groups of its times. Groups that the description was fitted to are not among them."""

SIDE, APART, LEFT, TOP = 172, 50, 46, 44
"""The side of a panel, the distance to the next one, and the position of the first one, in pixels."""

LEAST, MOST = 2, 2000
"""Microseconds at the ends of both axes."""

BAND = (0.75, 1.25)
"""Simulated over measured at the dashed lines."""


def accuracy() -> Figure:
    """A panel for each kind of work, a point for each time."""
    groups = {group["name"]: group["rows"] for group in measured("predictions")["groups"]}
    height = TOP + 2 * (SIDE + APART)
    figure = Figure("Simulated and measured times on H200", 460, height)
    for number, (title, names) in enumerate(PANELS.items()):
        x, y = LEFT + number % 2 * (SIDE + APART), TOP + number // 2 * (SIDE + APART)
        rows = [row for name in names for row in groups[name]]
        figure.text(x, y - 12, f"{title}: {len(rows)} times", "bold", 12, "start")
        _axes(figure, x, y, with_units=not number)
        for row in rows:
            figure.box(x + _at(row["measured"]) - 2.5, y + SIDE - _at(row["simulated"]) - 2.5, 5, 5, "d0")
    figure.text(452, height - 10, "dashed: 25 % above and below", "soft", 11, "end")
    return figure


def _at(us: float) -> float:
    """Pixels from the begin of an axis."""
    return SIDE * math.log(us / LEAST) / math.log(MOST / LEAST)


def _axes(figure: Figure, x: float, y: float, with_units: bool) -> None:
    figure.box(x, y, SIDE, SIDE, "plain")
    figure.line((x, y + SIDE), (x + SIDE, y))
    for factor in BAND:
        low, high = max(LEAST, LEAST / factor), min(MOST, MOST / factor)
        ends = ((x + _at(us), y + SIDE - _at(us * factor)) for us in (low, high))
        figure.line(*ends, kind="signal")
    for us in (10, 100, 1000):
        figure.text(x + _at(us), y + SIDE + 11, str(us), "soft", 11)
        figure.text(x - 5, y + SIDE - _at(us), str(us), "soft", 11, "end")
    if with_units:
        figure.text(x + SIDE - 5, y + SIDE - 10, "measured, us", "soft", 11, "end")
        figure.text(x + 5, y + 10, "simulated, us", "soft", 11, "start")
