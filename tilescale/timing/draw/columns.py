# SPDX-License-Identifier: MIT
"""The data of an interactive timeline as columns, without the rows, which follow from what a reader unfolds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilescale.timing.draw.picture import MOST_UNITS, ORDER, STYLE
from tilescale.timing.draw.shares import peaks, shares, together
from tilescale.timing.draw.tracks import tracks
from tilescale.timing.timeline import KINDS, Span, Timeline

MOST_SPANS = 40_000
"""Limit of drawn spans: beyond it the longest are drawn, and the critical path, to keep a page at a few megabytes."""

INTERVALS = 600
"""Number of time intervals over which a folded unit's shares are averaged."""

MOST_NAMED = 3
"""Steps that a share of a folded unit names, the most frequent first."""

Data = dict[str, Any]


class TimelineColumns:
    """The drawn content of a timeline.

    Attributes:
        units: numbers of the units that are drawn, evenly spread where there are many.
        there: how many spans they have.
        numbers: positions in the timeline of those that are drawn.
        tips: text of a span in addition to its times and amounts; spans have positions in it.
        share_tips: the same of shares of folded units: the steps that run in them.
    """

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        step = max(1, -(-timeline.rows // MOST_UNITS))
        self.units = range(0, timeline.rows, step)
        there = [(number, span) for number, span in enumerate(timeline.spans) if span.row in self.units]
        self.there = len(there)
        self._by_unit: dict[int, list[Span]] = {unit: [] for unit in self.units}
        for _, span in there:
            self._by_unit[span.row].append(span)
        if len(there) > MOST_SPANS:
            critical = set(timeline.critical_numbers)
            there.sort(key=lambda item: (item[0] not in critical, -item[1].seconds))
            there = sorted(there[:MOST_SPANS], key=lambda item: item[0])
        self.numbers = [number for number, _ in there]
        self.spans = [span for _, span in there]
        self.tips: list[str] = []
        self.share_tips: list[str] = []

    @cached_property
    def _tracks(self) -> list[int]:
        return tracks(self.spans)

    @cached_property
    def track_counts(self) -> list[int]:
        """Number of tracks of each unit."""
        found = dict.fromkeys(self.units, 0)
        for span, track in zip(self.spans, self._tracks, strict=True):
            found[span.row] = max(found[span.row], track + 1)
        return list(found.values())

    def sources(self, unfolded: bool) -> dict[str, Data]:
        """Columns by subject: units, spans, shares of folded units, the critical path, names of rows."""
        count = len(self.units)
        return {
            "units": {"tracks": self.track_counts, "open": [int(unfolded)] * count, "first": [0] * count},
            "spans": self._spans(),
            "shares": self._shares(),
            "path": self._path(),
            "labels": self._labels(),
        }

    def _place(self, span: Span) -> int:
        return self.units.index(span.row)

    def _spans(self) -> Data:
        known: dict[str, int] = {}
        tips = [known.setdefault(self._tip(span), len(known)) for span in self.spans]
        self.tips = list(known)
        return {
            "left": _us(span.begin_s for span in self.spans),
            "right": _us(span.end_s for span in self.spans),
            "unit": _whole(map(self._place, self.spans)),
            "track": _whole(self._tracks),
            "tip": _whole(tips),
            "nbytes": np.array([span.nbytes for span in self.spans], np.float32),
            "flops": np.array([span.flops for span in self.spans], np.float32),
            "colour": [STYLE[span.kind][0] for span in self.spans],
            **_unplaced(len(self.spans)),
        }

    def _tip(self, span: Span) -> str:
        lines = [f"{span.kind}: {span.name}", span.unit]
        if span.where is not None:
            lines.append(_line(span))
        cause = self.timeline.spans[span.cause] if span.cause is not None else None
        if cause is not None and (cause.row, cause.engine) != (span.row, span.engine):
            lines.append(f"{'waited for' if span.kind == 'wait' else 'after'} {cause.name} of {cause.unit}")
        return "\n".join(lines)

    def _shares(self) -> Data:
        most = together(peaks(self._by_unit.values()))
        rows: list[tuple[float, ...]] = []
        known: dict[str, int] = {}
        for place, (unit, spans) in enumerate(self._by_unit.items()):
            found = shares(spans, most, self.timeline.end_s).averaged(INTERVALS)
            running = _Running(spans, found.edges)
            heights = found.heights[[KINDS.index(kind) for kind in ORDER]]
            above = np.cumsum(heights, axis=0)
            for kind, interval in zip(*np.nonzero(heights > 1e-3), strict=True):
                high, share = above[kind, interval], heights[kind, interval]
                steps = "\n".join([f"{self.timeline.level} {unit}", *running.names(ORDER[kind], interval)])
                tip = known.setdefault(steps, len(known))
                rows.append((place, kind, found.edges[interval], found.edges[interval + 1], high - share, high, tip))
        self.share_tips = list(known)
        places, numbers, left, right, low, high, tips = np.array(rows).reshape(-1, 7).T
        styles = [STYLE[ORDER[int(number)]] for number in numbers]
        return {
            "unit": _whole(places), "left": _us(left), "right": _us(right), "low": low.astype(np.float32),
            "high": high.astype(np.float32), "share": (high - low).astype(np.float32),
            "colour": [colour for colour, *_ in styles], "kind": [title for _, title, *_ in styles],
            "tip": _whole(tips), **_unplaced(len(rows)),
        }  # fmt: skip

    def _path(self) -> Data:
        """The critical path, from span to span: where each begins and where it ends."""
        at = {number: place for place, number in enumerate(self.numbers)}
        points: list[tuple[float, int, int]] = []
        for number in self.timeline.critical_numbers:
            if number in at:
                span, track, before = self.spans[at[number]], self._tracks[at[number]], points[-1][0] if points else 0.0
                begin = max(span.begin_s, before)
                points += [(time, self._place(span), track) for time in (begin, max(span.end_s, begin))]
        time, units, tracks = np.array(points).reshape(-1, 3).T
        return {"x": _us(time), "unit": _whole(units), "track": _whole(tracks), "y": np.zeros(len(points), np.float32)}

    def _labels(self) -> Data:
        """The name of each unit, track -1, and of each engine, at the first of its tracks."""
        engines: dict[tuple[int, str], int] = {}
        for span, track in zip(self.spans, self._tracks, strict=True):
            key = self._place(span), span.engine
            engines[key] = min(track, engines.get(key, track))
        names = [(place, -1, f"{self.timeline.level} {unit}") for place, unit in enumerate(self.units)]
        names += [(place, track, engine) for (place, engine), track in engines.items()]
        text = [name for _, _, name in names]
        return {
            "unit": _whole([unit for unit, _, _ in names]), "track": _whole([track for _, track, _ in names]),
            "name": text, "text": list(text),
            "y": np.zeros(len(names), np.float32),
        }  # fmt: skip


class _Running:
    """Steps of a unit that run in each interval of time, by name and line."""

    def __init__(self, spans: Sequence[Span], edges: np.ndarray):
        self.known: dict[tuple[str, str], int] = {}
        named = [(span.kind, f"{span.name}  {_line(span)}".rstrip()) for span in spans]
        number = np.array([self.known.setdefault(step, len(self.known)) for step in named], np.intp)
        first = np.searchsorted(edges, [span.begin_s for span in spans], "right") - 1
        end = np.maximum(first + 1, np.searchsorted(edges, [span.end_s for span in spans], "left"))
        change = np.zeros((len(self.known), len(edges) + 1), np.int32)
        np.add.at(change, (number, first), 1)
        np.add.at(change, (number, end), -1)
        self.counts = np.cumsum(change, axis=1)

    def names(self, kind: str, interval: int) -> list[str]:
        """The steps of a kind in an interval, the most frequent first."""
        found = {step: int(self.counts[number, interval]) for (of, step), number in self.known.items() if of == kind}
        steps = sorted((step for step in found if found[step]), key=lambda step: -found[step])
        more = [f"and {len(steps) - MOST_NAMED} more"] if len(steps) > MOST_NAMED else []
        return [*(f"{step}  x{found[step]}" if found[step] > 1 else step for step in steps[:MOST_NAMED]), *more]


def _line(span: Span) -> str:
    return f"{Path(span.where.file).name}:{span.where.line}" if span.where is not None else ""


def _us(seconds: Iterable[float]) -> np.ndarray:
    return np.array([time * 1e6 for time in seconds], np.float32)


def _whole(numbers: Iterable[float]) -> np.ndarray:
    return np.array(list(numbers), np.int32)


def _unplaced(count: int) -> Data:
    """Boxes without positions; the reader's browser finds them."""
    return {side: np.zeros(count, np.float32) for side in ("top", "bottom")}
