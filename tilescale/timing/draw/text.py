# SPDX-License-Identifier: MIT
"""A timeline in words: how long, how long at least, how busy, along which path, and where it waited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilescale.errors import Location
from tilescale.hda.units import format_time
from tilescale.timing.timeline import Span, Timeline

MOST = 6
"""Lines of a list; what follows is added up in one more."""

BAR = 20


def summary(timeline: Timeline) -> str:
    """Duration, roofline bound, utilisation of each resource, critical path, and waits."""
    parts = [_duration(timeline), _utilization(timeline), _critical_path(timeline), _waits(timeline)]
    return "\n".join(line for part in parts for line in part)


def _duration(timeline: Timeline) -> Iterator[str]:
    yield f"simulated time  {format_time(timeline.end_s)}"
    bound = timeline.bound
    if bound is not None and timeline.end_s:
        share = bound.seconds / timeline.end_s
        yield f"at least        {format_time(bound.seconds)}, by {bound.use.resource} of {bound.use.unit} ({share:.0%})"


def _utilization(timeline: Timeline) -> Iterator[str]:
    if timeline.utilization:
        yield "busy"
    width = max(map(len, timeline.utilization), default=0)
    for resource, share in sorted(timeline.utilization.items(), key=lambda item: -item[1]):
        filled = min(BAR, round(share * BAR))
        yield f"  {resource:<{width}} {'#' * filled}{'.' * (BAR - filled)} {share:6.1%}"


def _critical_path(timeline: Timeline) -> Iterator[str]:
    path = timeline.critical_path
    if not path:
        return
    total: dict[tuple[str, str, Location | None], list[float]] = {}
    covered = 0.0
    at = path[0].begin_s
    for span in path:
        # Spans that overlap what led to them count for what they add.
        added = max(0.0, span.end_s - max(span.begin_s, at))
        at = max(at, span.end_s)
        covered += added
        total.setdefault((span.kind, span.name, span.where), []).append(added)
    yield f"critical path   {_steps(path)}"
    rows = sorted(((sum(times), len(times), *key) for key, times in total.items()), key=lambda row: -row[0])
    rest = timeline.end_s - covered
    entries = [(s, _named(kind, name, count), where) for s, count, kind, name, where in rows]
    if rest > 0.005 * timeline.end_s:
        entries.append((rest, "in between", None))
    yield from _list(entries, timeline.end_s)


def _steps(path: tuple[Span, ...]) -> str:
    rows = len({span.row for span in path})
    return f"{len(path)} step{'s' * (len(path) != 1)}" + (f" over {rows} units" if rows > 1 else "")


def _waits(timeline: Timeline) -> Iterator[str]:
    waits = timeline.waits
    if not waits:
        return
    engines = len({(span.row, span.engine) for span in timeline.spans if span.kind == "wait"})
    total = sum(line.seconds for line in waits)
    yield f"waited          {format_time(total)}, {engines} engine{'s together' if engines > 1 else ''}"
    yield from _list([(line.seconds, _named("wait", line.name, line.count), line.where) for line in waits], total)


def _named(kind: str, name: str, count: int) -> str:
    what = name if kind in name or kind == "compute" else f"{name} ({kind})"
    return what + (f" x{count}" if count > 1 else "")


def _list(entries: list[tuple[float, str, Location | None]], whole: float) -> Iterator[str]:
    entries = [entry for entry in entries if entry[0] > 0]
    shown, rest = entries[:MOST], entries[MOST:]
    if rest:
        shown = [*shown, (sum(entry[0] for entry in rest), f"{len(rest)} more", None)]
    width = max((len(name) for _, name, _ in shown), default=0)
    for seconds, name, where in shown:
        place = f"  {Path(where.file).name}:{where.line}" if where else ""
        share = seconds / whole if whole else 0.0
        yield f"  {format_time(seconds):>10} {share:6.1%}  {name:<{width}}{place}".rstrip()
