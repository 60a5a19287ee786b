# SPDX-License-Identifier: MIT
"""Rows of races on a console: a line for each size, a column for each system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilescale.hda.units import format_bytes

FASTEST, FAILED = "bold green", "red"

Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> RenderableType:
    """All rows, a table for each work; below them the contenders without a time, and the reasons."""
    works = list(dict.fromkeys((row["work"], row["mode"]) for row in rows))
    parts: list[RenderableType] = []
    for work, mode in works:
        own = [row for row in rows if (row["work"], row["mode"]) == (work, mode)]
        parts += [Text(f"{work}, {mode}, us", "bold"), _table(own), Text()]
    return Group(*parts, *_failures(rows))


def _table(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        same = {row["contender"]: row for row in rows if tuple(row["shape"]) == shape}
        least = min((row["us"] for row in same.values() if row["us"] is not None), default=None)
        table.add_row(_size(shape), *(_cell(same.get(name), least) for name in names))
    return table


def _size(shape: tuple[int, ...]) -> str:
    """Bytes of a tensor of bfloat16, or the extents of a GEMM."""
    return format_bytes(2 * shape[0]) if len(shape) == 1 else " x ".join(map(str, shape))


def _cell(row: Row | None, least: float | None) -> Text:
    if row is None:
        return Text("")
    if row["us"] is None:
        return Text("-", FAILED)
    ratio = f" ({row['ratio']:.2f} x)" if row["ratio"] is not None and row["contender"] != row["baseline"] else ""
    return Text(f"{row['us']:.4g}{ratio}", FASTEST if row["us"] == least else "")


def _failures(rows: Sequence[Row]) -> Iterator[Text]:
    for reason in dict.fromkeys((row["contender"], row["failed"].splitlines()[0]) for row in rows if "failed" in row):
        yield Text(f"{reason[0]} has no time: {reason[1][:160]}", FAILED)
