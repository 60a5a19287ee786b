# SPDX-License-Identifier: MIT
"""Units of a mesh or torus at their positions: rows and columns of cells with their links, the middle left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilescale.hda.draw.palette import paint

CELL, STEP = 20, 34
MOST = 8
"""Cells along one side; the middle of more is an ellipsis."""


def cells(dims: Sequence[int], wraps: bool) -> tuple[float, float, str]:
    """Width, height and SVG elements of (rows, columns) units, the first of them marked; a torus `wraps` around."""
    down, across = (list(_along(count)) for count in dims)
    width, height, around = len(across) * STEP, len(down) * STEP, CELL / 4 if wraps else STEP / 2
    wires = [_line(around, _middle(y), width - around, _middle(y), None in across) for y in _drawn(down)]
    wires += [_line(_middle(x), around, _middle(x), height - around, None in down) for x in _drawn(across)]
    boxes = [_cell(_middle(x), _middle(y), first=x == y == 0) for y in _drawn(down) for x in _drawn(across)]
    return width, height, "".join(wires + boxes)


def _middle(place: int) -> float:
    return place * STEP + STEP / 2


def _drawn(numbers: Sequence[int | None]) -> list[int]:
    """The places along a side that have a cell."""
    return [place for place, number in enumerate(numbers) if number is not None]


def _along(count: int) -> Iterator[int | None]:
    """Numbers of the units that are drawn along a side, None for those that are not."""
    if count <= MOST:
        yield from range(count)
    else:
        yield from (*range(MOST - 2), None, count - 1)


def _line(x1: float, y1: float, x2: float, y2: float, broken: bool) -> str:
    """The links of a row or column; dotted where cells are left out."""
    solid = _middle(MOST - 2) - STEP / 2 - min(x1, y1, x2, y2)
    dots = f' stroke-dasharray="{solid:g} 6 3 6 3 6 3 7 {2 * STEP}"' if broken else ""
    place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {place} {paint(stroke="wire")} stroke-width="1.5"{dots}/>'


def _cell(x: float, y: float, first: bool) -> str:
    fill = paint(fill="wire" if first else "level3", stroke="edge")
    return f'<rect x="{x - CELL / 2:g}" y="{y - CELL / 2:g}" width="{CELL}" height="{CELL}" rx="3" {fill}/>'
