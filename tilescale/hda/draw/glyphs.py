# SPDX-License-Identifier: MIT
"""A small sign for each topology: units as dots, links as lines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

from tilescale.hda.draw.palette import paint
from tilescale.hda.model import Network

GLYPH = 44
"""Width and height of a glyph in pixels."""

Point = tuple[float, float]


def glyph(net: Network) -> str:
    """SVG elements that show how the units of the network are linked, `GLYPH` wide and high."""
    if net.topology in ("mesh", "torus"):
        return _grid(net.topology == "torus")
    points = _circle(8 if net.topology == "ring" else 6)
    if net.topology == "switch":
        centre = (GLYPH / 2, GLYPH / 2)
        box = f'<rect x="{GLYPH / 2 - 6}" y="{GLYPH / 2 - 6}" width="12" height="12" rx="2" {paint("wire")}/>'
        return _lines((point, centre) for point in points) + box + _dots(points)
    if net.topology == "ring":
        links: Iterable[tuple[Point, Point]] = zip(points, points[1:] + points[:1], strict=True)
    elif net.topology == "point-to-point":
        links = combinations(points, 2)
    else:
        links = [(points[i], points[j]) for i, j in ((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5))]
    return _lines(links) + _dots(points)


def _circle(count: int) -> list[Point]:
    middle, radius = GLYPH / 2, GLYPH / 2 - 4
    angles = [2 * math.pi * i / count - math.pi / 2 for i in range(count)]
    return [(middle + radius * math.cos(angle), middle + radius * math.sin(angle)) for angle in angles]


def _grid(wraps: bool) -> str:
    at = [4 + i * (GLYPH - 8) / 3 for i in range(4)]
    # A line that leaves the grid stands for the links around a torus.
    start, end = (0.0, float(GLYPH)) if wraps else (at[0], at[-1])
    links = [((x, start), (x, end)) for x in at] + [((start, y), (end, y)) for y in at]
    return _lines(links) + _dots([(x, y) for x in at for y in at])


def _lines(links: Iterable[tuple[Point, Point]]) -> str:
    wire = paint(stroke="wire")
    return "".join(
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" {wire}/>' for a, b in links
    )


def _dots(points: Iterable[Point]) -> str:
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {paint("wire")}/>' for x, y in points)
