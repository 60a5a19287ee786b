# SPDX-License-Identifier: MIT
"""Timelines for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The trace event format: "Trace Event Format", Google, 2016. A unit that owns tensors is a process, an engine of it a
thread, a span a complete event ("X"), and where a span of one unit had to be for one of another to begin, a flow ("s"
to "f"). Slices of a thread must nest, so an engine that does several things at a time takes several threads. Times are
microseconds in whole nanoseconds, as viewers keep them, so that what follows each other does not overlap by rounding.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from os import PathLike, fspath
from typing import Any

from tilescale.timing.draw.files import writing
from tilescale.timing.draw.tracks import tracks
from tilescale.timing.timeline import Span, Timeline

Event = dict[str, Any]


def trace(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write a timeline as a trace file, compressed where the path ends in ".gz". Raises UsageError: no file can be made
    there."""
    document = {"traceEvents": list(events(timeline)), "displayTimeUnit": "ns"}
    name = fspath(path)
    make = gzip.open if name.endswith(".gz") else open
    with writing(path), make(name, "wt", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))


def written(timeline: Timeline, path: str | PathLike[str] | None) -> Timeline:
    """The timeline, after `trace` of it where there is a path."""
    if path is not None:
        trace(timeline, path)
    return timeline


def events(timeline: Timeline) -> Iterator[Event]:
    """The events of a timeline, names of units and engines first."""
    threads = tracks(timeline.spans)
    names: dict[tuple[int, int], str] = {}
    for span, tid in zip(timeline.spans, threads, strict=True):
        names.setdefault((span.row, tid), span.engine)
    for row in sorted({row for row, _ in names}):
        yield _meta("process_name", row, name=f"{timeline.level} {row}")
        yield _meta("process_sort_index", row, sort_index=row)
    for (row, tid), engine in sorted(names.items()):
        yield _meta("thread_name", row, tid, name=engine)
        yield _meta("thread_sort_index", row, tid, sort_index=tid)
    for span, tid in zip(timeline.spans, threads, strict=True):
        begin, end = _nanoseconds(span)
        yield {
            "ph": "X", "name": span.name, "cat": span.kind, "pid": span.row, "tid": tid,
            "ts": begin / 1000, "dur": (end - begin) / 1000, "args": _arguments(span),
        }  # fmt: skip
    for number, (span, tid) in enumerate(zip(timeline.spans, threads, strict=True)):
        if span.cause is not None and (cause := timeline.spans[span.cause]).row != span.row:
            yield from _flow(number, cause, threads[span.cause], span, tid)


def _meta(what: str, pid: int, tid: int | None = None, **arguments: object) -> Event:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": what, "pid": pid, **thread, "args": arguments}


def _arguments(span: Span) -> Event:
    found: Event = {"unit": span.unit}
    if span.where is not None:
        found["source"] = f"{span.where.file}:{span.where.line}"
    for name, amount, rate in (("bytes", span.nbytes, "GB/s"), ("operations", span.flops, "Gop/s")):
        if amount:
            found[name] = amount
            if span.seconds > 0:
                found[rate] = round(amount / span.seconds / 1e9, 3)
    return found


def _flow(number: int, cause: Span, cause_tid: int, span: Span, tid: int) -> Iterator[Event]:
    """An arrow from a span's cause to the span; both its ends have to be inside the slices, before they close."""
    common = {"name": cause.name, "cat": "cause", "id": number}
    (cause_begin, cause_end), (begin, end) = _nanoseconds(cause), _nanoseconds(span)
    start = cause_end - 1
    finish = max(begin, min(start, end - 1))
    if cause_begin <= start <= finish < end:
        yield {"ph": "s", **common, "pid": cause.row, "tid": cause_tid, "ts": start / 1000}
        yield {"ph": "f", "bp": "e", **common, "pid": span.row, "tid": tid, "ts": finish / 1000}


def _nanoseconds(span: Span) -> tuple[int, int]:
    return round(span.begin_s * 1e9), round(span.end_s * 1e9)
