# SPDX-License-Identifier: MIT
"""Tracks of a unit: its engines in natural order, as many tracks each as it does things at a time."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

from tilescale.timing.timeline import Span


def tracks(spans: Sequence[Span]) -> list[int]:
    """For each span its track in its unit; spans of a track do not overlap."""
    spans = list(spans)
    by_engine: dict[tuple[int, str], list[int]] = {}
    for i, span in enumerate(spans):
        by_engine.setdefault((span.row, span.engine), []).append(i)
    found = [0] * len(spans)
    used: dict[int, int] = {}
    for row, engine in sorted(by_engine, key=lambda key: (key[0], natural(key[1]))):
        first = used.get(row, 0)
        own = _of_engine(spans, by_engine[row, engine])
        for i, track in own.items():
            found[i] = first + track
        used[row] = first + 1 + max(own.values())
    return found


def _of_engine(spans: Sequence[Span], members: list[int]) -> dict[int, int]:
    """Spans of an engine -> tracks in which none overlap: the lowest one that is free when a span begins."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found: dict[int, int] = {}
    for i in sorted(members, key=lambda i: (spans[i].begin_s, spans[i].end_s)):
        span = spans[i]
        while busy and busy[0][0] <= span.begin_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        found[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end_s, found[i]))
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which "block 9" comes before "block 10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
