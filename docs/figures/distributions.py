# SPDX-License-Identifier: MIT
"""Times at shapes drawn at random, as distributions, from the committed results of `benchmarks/any_shape.py`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from docs.figures.charts import WORKS, measured, sign
from docs.figures.style import Figure

LEFT, UNIT, MOST, STEP = 176, 88, 2, 34
"""Where the scale begins, how long 1 of it is, its end, and the distance of two rows."""

NEAR = 1.03
"""A ratio up to which nothing is lost."""

NCCL, SYMM_MEM = OTHERS = "nccl+cublas", "symm_mem"
"""The contenders that ours are compared with."""


def ratios(others: Sequence[str] = OTHERS) -> dict[tuple[str, str, str], list[float]]:
    """(work, type, mode) -> our time over that of the fastest of `others`, for each shape in order."""
    times: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in measured("any_shape")["rows"]:
        if row["us"] is not None:
            times[row["work"], row["dtype"], row["mode"], tuple(row["shape"])][row["contender"]] = row["us"]
    found = defaultdict(list)
    for (work, dtype, mode, _), us in times.items():
        if known := [us[name] for name in others if name in us]:
            found[work, dtype, mode].append(us["tilescale"] / min(known))
    return {key: sorted(each) for key, each in sorted(found.items())}


def any_shape() -> Figure:
    """A row for each operator: the median, where four fifths of the shapes lie, and all of them."""
    rows = ratios()
    height = STEP * len(rows) + 66
    figure = Figure("Times of operators at random shapes, over those of PyTorch", 460, height)
    figure.text(LEFT, 12, "time over the best of NCCL and symm_mem", "soft", 11, "start")
    for number, ((work, dtype, mode), each) in enumerate(rows.items()):
        _row(figure, 28 + STEP * number, f"{WORKS[work]}", f"{dtype.partition('_')[0]}, {mode}", each)
    bottom = 28 + STEP * len(rows)
    for mark in (0.5, 1, MOST):
        x = LEFT + UNIT * mark
        figure.line((x, 24), (x, bottom), kind="signal" if mark == 1 else "axis")
        figure.text(x, bottom + 10, f"{mark:g}", "soft", 11)
    sign(figure, height, measured("any_shape"), f"{sum(map(len, rows.values()))} races")
    return figure


def _row(figure: Figure, top: float, name: str, how: str, each: list[float]) -> None:
    def x(ratio: float) -> float:
        return LEFT + UNIT * min(ratio, MOST)

    low, high = each[len(each) // 10], each[-1 - len(each) // 10]
    figure.text(LEFT - 6, top + 7, name, "", 11, "end")
    figure.text(LEFT - 6, top + 20, how, "soft", 11, "end")
    figure.line((x(each[0]), top + 13), (x(each[-1]), top + 13))
    figure.box(x(low), top + 5, x(high) - x(low), 16, "d0")
    middle = x(statistics.median(each))
    figure.line((middle, top + 3), (middle, top + 23), kind="data")
    over = sum(ratio > NEAR for ratio in each)
    figure.text(LEFT + UNIT * MOST + 8, top + 7, f"{statistics.median(each):.2f}", "bold", 11, "start")
    figure.text(LEFT + UNIT * MOST + 8, top + 20, f"{over} of {len(each)} over {NEAR}", "soft", 11, "start")
