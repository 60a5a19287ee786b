# SPDX-License-Identifier: MIT
"""A timeline as a picture: one row for each unit that owns tensors, or for each of its engines.

Colours are those of Okabe and Ito, "Color Universal Design", 2008, distinguishable with any colour vision; waits are
hatched as well. A row is as full as its engines are busy, so that hundreds of programs fit into one. An SVG is light or
dark as its reader prefers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilescale.errors import DependencyError
from tilescale.timing.draw.files import writing
from tilescale.timing.draw.shares import family, peaks, shares, together
from tilescale.timing.draw.text import heading
from tilescale.timing.draw.tracks import natural
from tilescale.timing.timeline import KINDS, Span, Timeline

STYLE = {
    "compute": ("#0072B2", "compute"),
    "transfer": ("#E69F00", "transfers"),
    "collective": ("#009E73", "collectives"),
    "wait": ("#D55E00", "waits"),
    "launch": ("#999999", "launches"),
    "sync": ("#CC79A7", "signals and barriers"),
}
"""Kind of span -> colour, and the legend's word."""

ORDER = ("compute", "transfer", "collective", "launch", "sync", "wait")
"""Order of the kinds in a row, from the bottom."""

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class _Theme:
    """Colours of the drawing other than those of spans and their names."""

    paper: str
    ink: str
    grid: str
    waiting: str


LIGHT = _Theme(paper="#ffffff", ink="#1f2a37", grid="#dddddd", waiting="#FBE9DF")
DARK = _Theme(paper="#131416", ink="#d5d9e0", grid="#3a3f47", waiting="#3b2618")

_PAPER = "paper"
"""The name of the background in an SVG."""

WIDTH, TEXT = 10, 9
"""Inches of a picture, and points of its small text: 9 pixels or more on a page at least 730 pixels wide."""

COLUMNS = 800
MOST_UNITS, MOST_WITH_ENGINES = 32, 12
"""Number of units shown, spread evenly over many; fewer where each has several rows."""

MOST_LABELLED = 200
"""Spans of a row whose names are written; of more only those of the unit itself, the others could not be read."""

MOST_ENGINES = 12
"""Number of engines of a unit that have a row each; more of them are drawn family by family."""


@dataclass(frozen=True)
class _Row:
    """A row of the picture: spans of a unit, whose `own` engine makes phases and collectives."""

    name: str
    spans: Sequence[Span]
    unit: int
    own: str


def picture(timelines: Mapping[str, Timeline], target: Path, *, engines: bool, dark: bool) -> None:
    """Draw timelines with matplotlib into a file of one of `FORMATS`, one below the other on one axis of time.

    Args:
        timelines: by name; a single one needs none, "".
        engines, dark: as for `tilescale.Report.plot`.

    Raises:
        UsageError: no file can be made there.
        DependencyError: matplotlib is missing.
    """
    figure = _figure()
    theme = DARK if dark else LIGHT
    found = [_rows(timeline, engines) for timeline in timelines.values()]
    heights = [1.25 + (0.34 if len(rows) > 24 else 0.46) * len(rows) for rows in found]
    figure.set_size_inches(WIDTH, sum(heights))
    figure.set_facecolor(theme.paper)
    figure.patch.set_gid(_PAPER)
    panels = figure.subplots(len(found), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (name, timeline), rows in zip(panels, timelines.items(), found, strict=True):
        _panel(axes, timeline, rows, engines, theme)
        title = f"{name}: {_title(rows, timeline)}" if name else _title(rows, timeline)
        axes.set_title(title, fontsize=10, loc="left", pad=24, color=theme.ink)
    panels[-1].set_xlim(0, max(timeline.end_s for timeline in timelines.values()) * 1e6 or 1)
    _write(figure, target)
    if target.suffix == ".svg" and not dark:
        target.write_text(_with_dark(target.read_text(encoding="utf-8")), encoding="utf-8")


def _with_dark(svg: str) -> str:
    """The same drawing with a stylesheet for readers who prefer dark pages; the colours of kinds stay."""
    rules = [f"#{_PAPER} path{{fill:{DARK.paper}!important}}"]
    for light, dark in ((LIGHT.ink, DARK.ink), (LIGHT.grid, DARK.grid), (LIGHT.waiting, DARK.waiting)):
        for what in "fill", "stroke":
            places = f'[style*="{what}: {light}" i],[{what}="{light}" i]'
            rules.append(f"{places}{{{what}:{dark}!important}}")
    style = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda begin: f"{begin[0]}\n {style}", svg, count=1)


def _panel(axes: Any, timeline: Timeline, rows: Sequence[_Row], engines: bool, theme: _Theme) -> None:
    most = peaks(row.spans for row in rows)
    most = most if engines else together(most)
    for number, row in enumerate(rows):
        _draw_row(axes, number, row, most, timeline.end_s, theme)
    _draw_critical_path(axes, rows, timeline, theme)
    _dress(axes, rows, timeline, engines, theme)


def _write(figure: Any, target: Path) -> None:
    """The same file for the same timeline: no date, and no random names inside."""
    from matplotlib import rc_context

    vector = {"metadata": {"Date": None}} if target.suffix == ".svg" else {}
    with rc_context({"svg.hashsalt": "tilescale"}), writing(target):
        figure.savefig(target, dpi=150, **vector)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DependencyError(
            "a picture of a timeline needs matplotlib", hint="pip install matplotlib, or write a trace instead"
        ) from None
    return Figure(layout="constrained")


def _by_row(timeline: Timeline) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in timeline.spans:
        found.setdefault(span.row, []).append(span)
    return dict(sorted(found.items()))


def _rows(timeline: Timeline, engines: bool) -> list[_Row]:
    units = _by_row(timeline)
    step = max(1, -(-len(units) // (MOST_WITH_ENGINES if engines else MOST_UNITS)))
    shown = {unit: units[unit] for unit in list(units)[::step]}
    if not engines:
        return [_Row(f"{timeline.level} {unit}", spans, unit, timeline.level) for unit, spans in shown.items()]
    rows = []
    first = lambda name: (name != timeline.level, natural(name))  # noqa: E731 - the unit's own engine leads
    for unit, spans in shown.items():
        many = len({span.engine for span in spans}) > MOST_ENGINES
        groups: dict[str, list[Span]] = {}
        for span in spans:
            groups.setdefault(family(span.engine) if many else span.engine, []).append(span)
        rows += [_Row(name, groups[name], unit, timeline.level) for name in sorted(groups, key=first)]
    return rows


def _draw_row(axes: Any, number: int, row: _Row, most: dict[str, int], end_s: float, theme: _Theme) -> None:
    found = shares(row.spans, most, end_s).averaged(COLUMNS)
    bottom = number + 0.42
    lower = bottom + 0 * found.edges[:-1]
    for kind in ORDER:
        height = found.heights[KINDS.index(kind)] * 0.84
        if not height.any():
            continue
        upper = lower - height
        steps = dict(step="post", linewidth=0, facecolor=STYLE[kind][0])
        ends = _corners(found.edges * 1e6, lower, upper)
        if kind == "wait":
            steps |= dict(hatch="/////", edgecolor=STYLE[kind][0], facecolor=theme.waiting)
        axes.fill_between(*ends, **steps)
        lower = upper
    _label(axes, number, row, end_s)


def _corners(edges: np.ndarray, *steps: np.ndarray) -> list[np.ndarray]:
    """Edges where one of the steps changes by what can be seen, and the steps there; the last one twice, as its end."""
    seen = [step.round(3) for step in steps]
    changes = np.flatnonzero(np.append(True, np.logical_or.reduce([np.diff(step) != 0 for step in seen])))
    return [np.append(edges[changes], edges[-1]), *(np.append(step[changes], step[-1]) for step in seen)]


def _label(axes: Any, number: int, row: _Row, end_s: float) -> None:
    """Names of what fills its row for long enough."""
    named = row.spans if len(row.spans) <= MOST_LABELLED else [s for s in row.spans if s.engine == row.own]
    for run in _runs(named[:MOST_LABELLED], gap=0.005 * end_s):
        name = run[0].name + (f" x{len(run)}" if len(run) > 1 else "")
        begin, end = run[0].begin_s, run[-1].end_s
        alone = not any(s.begin_s < end and s.end_s > begin for s in row.spans if s not in run)
        if alone and run[0].kind != "wait" and (end - begin) / end_s > 0.009 * len(name) + 0.01:
            middle = (begin + end) / 2 * 1e6
            axes.text(middle, number, name, ha="center", va="center", fontsize=TEXT, color="white", clip_on=True)


def _runs(spans: Sequence[Span], gap: float) -> list[list[Span]]:
    """Spans in order, those of one name that follow each other together."""
    runs: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        last = runs[-1][-1] if runs else None
        alike = last is not None and (last.name, last.kind) == (span.name, span.kind)
        if last is not None and alike and 0 <= span.begin_s - last.end_s <= gap:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _draw_critical_path(axes: Any, rows: Sequence[_Row], timeline: Timeline, theme: _Theme) -> None:
    """A line below the spans that the end had to wait for, from row to row where one led to another."""
    place = {id(span): number for number, row in enumerate(rows) for span in row.spans}
    points: list[tuple[float, float]] = []
    for span in timeline.critical_path:
        if id(span) not in place:
            continue
        y, at = place[id(span)] + 0.46, points[-1][0] if points else 0.0
        begin, end = max(span.begin_s * 1e6, at), max(span.end_s * 1e6, at)
        if points:
            points.append((begin, points[-1][1]))
        points += [(begin, y), (end, y)]
    if points:
        axes.plot(*zip(*points, strict=True), color=theme.ink, linewidth=1.1, solid_capstyle="butt")


def _dress(axes: Any, rows: Sequence[_Row], timeline: Timeline, engines: bool, theme: _Theme) -> None:
    handles = _legend({span.kind for row in rows for span in row.spans}, theme)
    axes.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(handles), frameon=False,
        labelcolor=theme.ink, fontsize=TEXT, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=TEXT)
    axes.set_ylim(len(rows) - 0.45, -0.5)
    axes.set_xlabel("simulated time in us", color=theme.ink)
    full = "as full as it is busy"
    what = f"engines of {timeline.level}s" if engines else f"{timeline.level}s"
    axes.set_ylabel(f"{what}, each row\n{full}", color=theme.ink, fontsize=TEXT)
    axes.tick_params(axis="y", length=0, labelcolor=theme.ink)
    axes.tick_params(axis="x", colors=theme.ink)
    axes.grid(axis="x", color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.ink)
    if engines:
        _separate_units(axes, rows, timeline.level, theme)
    axes.set_facecolor("none")


def _legend(kinds: set[str], theme: _Theme) -> list[Any]:
    """Legend of the colours of some kinds of spans, and of the line."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    waits = dict(facecolor=theme.waiting, hatch="/////", linewidth=0)
    handles: list[Any] = [
        Patch(label=word, edgecolor=colour, **(waits if kind == "wait" else dict(facecolor=colour)))
        for kind, (colour, word) in STYLE.items()
        if kind in kinds
    ]
    return [*handles, Line2D([], [], color=theme.ink, linewidth=1.1, label="critical path")]


def _separate_units(axes: Any, rows: Sequence[_Row], level: str, theme: _Theme) -> None:
    for number, row in enumerate(rows):
        if number == 0 or rows[number - 1].unit != row.unit:
            axes.axhline(number - 0.5, color="#888888", linewidth=0.8)
            axes.annotate(
                f"{level} {row.unit}", (1, number), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", fontsize=TEXT, va="center", color=theme.ink,
            )  # fmt: skip


def _title(rows: Sequence[_Row], timeline: Timeline) -> str:
    return heading(timeline, len({row.unit for row in rows}))
