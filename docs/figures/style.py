# SPDX-License-Identifier: MIT
"""How all figures of the documentation are drawn: boxes, tiles, arrows and bars, as SVG with colours by role.

A colour is a role, such as "data of device 2" or "signal". Its value comes from a stylesheet inside the file that has a
light and a dark set, for a file that stands alone and for one inside a page that lets the reader choose (furo's
`data-theme`). Coordinates and sizes are in pixels; a figure is at most `WIDEST` wide, so that a phone can show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree

WIDEST = 480
"""The widest figure: scaled down to a phone, its smallest text is still 9 pixels high."""

LIGHT = {
    "ink": "#1f2a37",
    "soft": "#5b6776",
    "line": "#8496aa",
    "unit": "#f3f6fa",
    "plain": "#ffffff",
    "d0": "#bcdcf5",
    "d1": "#fcd9a8",
    "d2": "#bfe6d3",
    "d3": "#ecc7de",
    "sum": "#ddd3f5",
    "wait": "#fbe9df",
    "data": "#1d5fbf",
    "signal": "#c2410c",
}
DARK = {
    "ink": "#e6e9ee",
    "soft": "#a3afbf",
    "line": "#74869b",
    "unit": "#1d2630",
    "plain": "#131920",
    "d0": "#1f4e72",
    "d1": "#7a4f12",
    "d2": "#1c5c45",
    "d3": "#6a3457",
    "sum": "#4b3b7a",
    "wait": "#5a3322",
    "data": "#79b0ff",
    "signal": "#ff9a5c",
}
"""Role -> colour. d0 to d3 are what belongs to a device, `sum` what is combined of several."""

FILLS = ("unit", "plain", "d0", "d1", "d2", "d3", "sum", "wait")

Point = tuple[float, float]


def stylesheet() -> str:
    """The colours of both themes, and what each class of a shape looks like."""
    light, dark = (";".join(f"--{role}:{value}" for role, value in theme.items()) for theme in (LIGHT, DARK))
    rules = [
        f".figure{{{light};font-family:system-ui,Helvetica,Arial,sans-serif}}",
        f"[data-theme=dark] .figure{{{dark}}}",
        f"@media (prefers-color-scheme:dark){{.figure:root,[data-theme=auto] .figure{{{dark}}}}}",
        ".figure text{fill:var(--ink)}",
        ".figure text.soft{fill:var(--soft)}",
        ".figure text.data{fill:var(--data)}",
        ".figure text.signal{fill:var(--signal)}",
        ".figure text.code{font-family:ui-monospace,Menlo,Consolas,monospace}",
        ".figure text.bold{font-weight:600}",
        ".figure rect{stroke:var(--line)}",
        ".figure rect.frame{fill:none;stroke-dasharray:5 4}",
        ".figure path{fill:none;stroke-width:2}",
        ".figure path.axis{stroke:var(--line);stroke-width:1.2}",
        *(f".figure rect.{role}{{fill:var(--{role})}}" for role in FILLS),
        *(f".figure path.{role}{{stroke:var(--{role})}}" for role in ("data", "signal", "line")),
        *(f".figure polygon.{role}{{fill:var(--{role})}}" for role in ("data", "signal", "line")),
        ".figure path.signal{stroke-dasharray:5 3}",
    ]
    return "".join(rules)


class Figure:
    """A drawing that is made shape by shape; its title is what a screen reader says."""

    def __init__(self, title: str, width: float, height: float):
        if width > WIDEST:
            raise ValueError(f"{title!r} is {width} wide, and a phone shows up to {WIDEST}")
        size = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width * 1.2:g}"}
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "figure", **size})
        self.root.set("role", "img")
        self._add("title").text = title
        self._add("style").text = stylesheet()

    def _add(self, tag: str, **given: object) -> ElementTree.Element:
        words = {name.rstrip("_").replace("_", "-"): _word(value) for name, value in given.items() if value != ""}
        return ElementTree.SubElement(self.root, tag, words)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        kind: str = "unit",
        label: str = "",
        text: str = "",
        size: float = 12,
    ) -> None:
        """A rectangle with rounded corners, and a label in its middle whose kind is `text`."""
        self._add("rect", x=x, y=y, width=w, height=h, rx=min(5, h / 6), class_=kind)
        if label:
            self.text(x + w / 2, y + h / 2, label, text, size)

    def text(self, x: float, y: float, text: str, kind: str = "", size: float = 13, anchor: str = "middle") -> None:
        """A line of text whose middle is at height y; `kind` is soft, bold, code, data or signal."""
        shape = self._add("text", x=x, y=y + 0.36 * size, class_=kind, font_size=size, text_anchor=anchor)
        shape.text = text

    def arrow(self, *points: Point, kind: str = "data", bend: float = 0.0) -> None:
        """Through all points; one between two points may bend, to the left for a positive number of pixels."""
        (x0, y0), (x1, y1) = points[0], points[-1]
        length = math.hypot(x1 - x0, y1 - y0)
        middle = ((x0 + x1) / 2 + bend * (y1 - y0) / length, (y0 + y1) / 2 - bend * (x1 - x0) / length)
        near = middle if bend else points[-2]
        tip = math.hypot(x1 - near[0], y1 - near[1])
        dx, dy = (x1 - near[0]) / tip, (y1 - near[1]) / tip
        end = (x1 - 7 * dx, y1 - 7 * dy)
        way = f"Q{_pair(middle)} {_pair(end)}" if bend else " ".join(f"L{_pair(p)}" for p in (*points[1:-1], end))
        self._add("path", d=f"M{_pair(points[0])} {way}", class_=kind)
        head = [(x1, y1), (end[0] - 4 * dy, end[1] + 4 * dx), (end[0] + 4 * dy, end[1] - 4 * dx)]
        self._add("polygon", points=" ".join(map(_pair, head)), class_=kind)

    def line(self, *points: Point, kind: str = "axis") -> None:
        """A line through points, without a tip."""
        self._add("path", d="M" + " L".join(map(_pair, points)), class_=kind)

    def tiles(self, x: float, y: float, rows: Sequence[str], cell: float | Point = 24, labels: bool = False) -> None:
        """A matrix of tiles. A row is a text of one character a tile: 0 to 3 its device, + a sum, . nothing."""
        width, height = cell if isinstance(cell, tuple) else (cell, cell)
        for i, row in enumerate(rows):
            for j, owner in enumerate(row):
                kind = {".": "plain", "+": "sum"}.get(owner, f"d{owner}")
                label = owner if labels and owner != "." else ""
                self.box(x + j * width, y + i * height, width, height, kind, label)

    def bars(
        self, x: float, y: float, rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]], unit: float
    ) -> None:
        """What happens when: a row is a name and its steps (time, kind, text), one after the other.

        Args:
            x: where time begins; names end left of it.
            unit: pixels for one unit of time.
        """
        for number, (name, steps) in enumerate(rows):
            top, at = y + 32 * number, x
            self.text(x - 8, top + 12, name, size=12, anchor="end")
            for time, kind, text in steps:
                if kind:
                    self.box(at, top, time * unit, 24, kind, text)
                at += time * unit
        bottom = y + 32 * len(rows) + 4
        longest = max(sum(step[0] for step in steps) for _, steps in rows)
        self.arrow((x, bottom), (x + longest * unit + 12, bottom), kind="line")
        self.text(x + longest * unit + 12, bottom + 12, "time", "soft", 11, "end")

    def svg(self) -> str:
        """The file's text."""
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def _pair(point: Point) -> str:
    return f"{_word(point[0])} {_word(point[1])}"


def _word(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, int | float) else str(value)
