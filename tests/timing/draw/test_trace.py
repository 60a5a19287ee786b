# SPDX-License-Identifier: MIT
"""Traces follow the trace event format, so that Perfetto shows all of them."""

import gzip
import json
from pathlib import Path

import pytest

from tests.timing.draw.timelines import grid, ring
from tilescale.timing.draw import trace
from tilescale.timing.timeline import Span, Timeline


def written(timeline, path: Path) -> list[dict]:
    trace(timeline, path)
    document = json.loads(gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes())
    assert document["displayTimeUnit"] in ("ms", "ns")
    return document["traceEvents"]


def of(events: list[dict], phase: str) -> list[dict]:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("timeline", [ring(), grid()], ids=["ring", "grid"])
def test_every_span_is_a_slice_and_slices_of_a_thread_do_not_overlap(timeline, tmp_path: Path):
    events = written(timeline, tmp_path / "t.json")
    slices = of(events, "X")
    assert len(slices) == len(timeline.spans)
    for event, span in zip(slices, timeline.spans, strict=True):
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} < set(event)
        assert (event["name"], event["pid"]) == (span.name, span.row)
        assert event["ts"] == pytest.approx(span.begin_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(span.seconds * 1e6, abs=1e-3)
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for members in threads.values():
        members.sort(key=lambda event: event["ts"])
        for one, next_ in zip(members, members[1:], strict=False):
            assert one["ts"] + one["dur"] <= next_["ts"] + 1e-9


def test_units_are_processes_and_engines_threads_in_their_order(tmp_path: Path):
    events = written(grid(2, 12), tmp_path / "t.json.gz")
    meta = of(events, "M")
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    assert processes == {0: "device 0", 1: "device 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    names = [threads[0, tid] for tid in range(len(threads) // 2)]
    # Two concurrent loads make two threads of one engine; block 9 precedes block 10.
    assert names[:3] == ["block 0", "block 0 ahead", "block 0 ahead"]
    assert names.index("block 9") < names.index("block 10") and names[-1] == "device"


def test_arrows_lead_from_what_was_waited_for(tmp_path: Path):
    timeline = ring(4, 3)
    events = written(timeline, tmp_path / "t.json")
    starts, ends = ({e["id"]: e for e in of(events, phase)} for phase in "sf")
    # Device 1 is slow: twice it had not to wait for device 0, and waits of no length have no arrow.
    waits = [span for span in timeline.spans if span.kind == "wait" and span.seconds > 0]
    assert len(starts) == len(waits) >= 9 and starts.keys() == ends.keys()
    slices = of(events, "X")
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e" and start["name"] == end["name"] and start["ts"] <= end["ts"]
        assert (end["pid"] - start["pid"]) % 4 == 1
        for arrow, name in ((start, "signal"), (end, "wait for flag[0] >= 1")):
            inside = [
                s["name"]
                for s in slices
                if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
                and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
            ]
            assert name in inside


def test_arguments_say_where_and_how_much(tmp_path: Path):
    events = written(ring(), tmp_path / "t.json")
    copy = next(e for e in of(events, "X") if e["name"] == "copy")
    assert copy["args"] == {"unit": "device 0, block 0", "source": "program.py:7", "bytes": 4000, "GB/s": 2.0}
    add = next(e for e in of(events, "X") if e["name"] == "add")
    assert add["args"]["operations"] == 1000 and add["args"]["Gop/s"] == 1.0


def test_times_that_are_no_whole_nanoseconds_do_not_overlap(tmp_path: Path):
    third = 1e-9 / 3
    spans = [Span(0, "block 0", "u", f"{i}", "compute", 4 * i * third, 4 * (i + 1) * third) for i in range(100)]
    slices = of(written(Timeline("device", tuple(spans), (), 1e-6), tmp_path / "t.json"), "X")
    for one, next_ in zip(slices, slices[1:], strict=False):
        assert round(1000 * (one["ts"] + one["dur"])) == round(1000 * next_["ts"])
