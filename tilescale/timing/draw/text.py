# SPDX-License-Identifier: MIT
"""A timeline in words: how long, how long at least, how busy, along which path, and where it waited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tilescale.errors import Location
from tilescale.hda.units import format_time
from tilescale.timing.timeline import Timeline

MOST = 6
"""Lines of a list; the rest is added up in one more."""

BAR = 20


def summary(timeline: Timeline) -> str:
    """Duration, roofline bound, utilisation of each resource, critical path, and waits."""
    parts = [_duration(timeline), _utilization(timeline), _critical_path(timeline), _waits(timeline)]
    return "\n".join(line for part in parts for line in part)


def heading(timeline: Timeline, shown: int) -> str:
    """A line above a drawing of `shown` units: the program, the machine, the time, and a lower bound of it."""
    parts = [f"{timeline.title}: {format_time(timeline.end_s)}" if timeline.title else format_time(timeline.end_s)]
    bound = timeline.bound
    if bound is not None:
        parts.append(f"at least {format_time(bound.seconds)} by {timeline.called(bound.use.resource)}")
    if shown < timeline.rows:
        parts.append(f"{shown} of {timeline.rows} {timeline.level}s shown")
    return ", ".join(parts)


def _duration(timeline: Timeline) -> Iterator[str]:
    yield f"simulated time  {format_time(timeline.end_s)}"
    bound = timeline.bound
    if bound is not None and timeline.end_s:
        use = bound.use
        owner = use.unit if f"({use.resource})" in use.unit else f"{timeline.called(use.resource)} of {use.unit}"
        yield f"at least        {format_time(bound.seconds)} ({bound.seconds / timeline.end_s:.0%}), by {owner}"


def _utilization(timeline: Timeline) -> Iterator[str]:
    if timeline.utilization:
        yield "busy"
    width = max((len(timeline.called(resource)) for resource in timeline.utilization), default=0)
    for resource, share in sorted(timeline.utilization.items(), key=lambda item: -item[1]):
        filled = min(BAR, round(share * BAR))
        yield f"  {timeline.called(resource):<{width}} {'#' * filled}{'.' * (BAR - filled)} {share:6.1%}"


def _critical_path(timeline: Timeline) -> Iterator[str]:
    path = timeline.critical_path
    if not path:
        return
    lines: dict[tuple[str, str, Location | None], list[float]] = {}
    at = path[0].begin_s
    for span in path:
        # Spans that overlap their causes count for the time that they add.
        added = max(0.0, span.end_s - max(span.begin_s, at))
        at = max(at, span.end_s)
        lines.setdefault((span.kind, span.name, span.where), []).append(added)
    entries = [_LineTime(sum(times), len(times), *key) for key, times in lines.items()]
    rest = timeline.end_s - sum(entry.seconds for entry in entries)
    if rest > 0.005 * timeline.end_s:
        entries.append(_LineTime(rest, 1, "", "in between", None))
    units = len({span.row for span in path})
    steps = f"{len(path)} step{'s' * (len(path) != 1)}" + (f" over {units} units" if units > 1 else "")
    yield f"critical path   {steps}"
    yield from _list(entries, timeline.end_s)


def _waits(timeline: Timeline) -> Iterator[str]:
    entries = [_LineTime(line.seconds, line.count, "wait", line.name, line.where) for line in timeline.waits]
    if not entries:
        return
    engines = len({(span.row, span.engine) for span in timeline.spans if span.kind == "wait"})
    total = sum(entry.seconds for entry in entries)
    yield f"waited          {format_time(total)}, {engines} engine{'s together' if engines > 1 else ''}"
    yield from _list(entries, total)


class _LineTime(NamedTuple):
    seconds: float
    times: int
    kind: str
    name: str
    where: Location | None

    @property
    def what(self) -> str:
        return f"{self.kind:<10} {self.name}" + (f" x{self.times}" if self.times > 1 else "")


def _list(entries: list[_LineTime], whole: float) -> Iterator[str]:
    """The longest entries, one a line, and the sum of the others."""
    entries = sorted((entry for entry in entries if entry.seconds > 0), key=lambda entry: -entry.seconds)
    shown, rest = entries[:MOST], entries[MOST:]
    if rest:
        shown.append(_LineTime(sum(entry.seconds for entry in rest), 1, "", f"{len(rest)} more", None))
    width = max((len(entry.what) for entry in shown), default=0)
    for entry in shown:
        place = f"  {Path(entry.where.file).name}:{entry.where.line}" if entry.where else ""
        share = entry.seconds / whole if whole else 0.0
        yield f"  {format_time(entry.seconds):>10} {share:6.1%}  {entry.what:<{width}}{place}".rstrip()
