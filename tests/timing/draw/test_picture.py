# SPDX-License-Identifier: MIT
"""Pictures of timelines: what a row shows, and which rows there are."""

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.timing.draw.timelines import US, grid, ring
from tilescale.errors import DependencyError, UsageError
from tilescale.timing.draw import compare, plot
from tilescale.timing.draw.picture import DARK, LIGHT, STYLE
from tilescale.timing.draw.shares import family, peaks, shares, together
from tilescale.timing.timeline import KINDS, Span, Timeline


def row(timeline: Timeline, unit: int) -> list:
    return [span for span in timeline.spans if span.row == unit]


def share_at(timeline: Timeline, kind: str, time_us: float, unit: int = 0) -> float:
    rows = {span.row: row(timeline, span.row) for span in timeline.spans}
    found = shares(rows[unit], together(peaks(rows.values())), timeline.end_s)
    return found.heights[KINDS.index(kind), np.searchsorted(found.edges, time_us * US, side="right") - 1]


def test_families_are_engines_that_differ_by_number():
    assert {family(name) for name in ("block 0", "block 17.1")} == {"block"}
    assert family("block 17 ahead transfer") == family("block 17.0/1 ahead transfer") == "block ahead transfer"


def test_a_row_is_as_full_as_its_engines_are_busy():
    timeline = grid(2, 132)
    assert share_at(timeline, "launch", 0.5) == 1.0
    # One load of each block, later two, later both kinds.
    assert share_at(timeline, "transfer", 1.2) == pytest.approx(0.5)
    assert share_at(timeline, "transfer", 1.7) == pytest.approx(1.0)
    assert share_at(timeline, "compute", 3.0) == pytest.approx(1.0)
    # A third of the blocks has ended, then two thirds.
    assert share_at(timeline, "compute", 4.5) == pytest.approx(2 / 3)
    assert share_at(timeline, "compute", 5.5) == pytest.approx(1 / 3)
    assert share_at(timeline, "collective", 7.0) == 1.0


def test_families_that_are_busy_together_share_the_row():
    timeline = ring()
    # Device 0 waits from 3 us on, while its signal is in flight.
    assert share_at(timeline, "wait", 3.5) == pytest.approx(0.5) == share_at(timeline, "sync", 3.5)


def test_sides_of_a_program_are_parts_of_it():
    """Two blocks compute, then one of them forks in two: the row is full, then as full as blocks are busy."""
    alone = [Span(0, f"block {b}", "u", "gemm", "compute", 0.0, 2 * US) for b in range(2)]
    forked = [Span(0, f"block 0/{side}", "u", "gemm", "compute", 2 * US, (4 + side) * US) for side in range(2)]
    timeline = Timeline("device", (*alone, *forked), (), 5 * US)
    assert [share_at(timeline, "compute", at) for at in (1.0, 3.0, 4.5)] == [1.0, 0.5, 0.25]


def test_what_few_of_many_programs_do_counts_as_few():
    most = {"device": 1, "block": 132, "block ahead": 264, "block signals": 8}
    assert together(most) == {"device": 1, "block": 132, "block ahead": 264, "block signals": 132}


def test_means_keep_what_there_is():
    timeline = grid(1, 132)
    exact = shares(row(timeline, 0), peaks([row(timeline, 0)]), timeline.end_s)
    coarse = exact.averaged(4)
    assert coarse.heights.shape == (len(KINDS), 4)
    total = [(s.heights * np.diff(s.edges)).sum(1) for s in (exact, coarse)]
    np.testing.assert_allclose(*total, rtol=1e-9)
    assert exact.averaged(1000) is exact


def texts(path: Path) -> list[str]:
    """Texts of an SVG by matplotlib: it draws letters as shapes and names each text in a comment."""
    import re

    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_one_row_a_device(tmp_path: Path):
    plot(grid(16), tmp_path / "t.svg")
    said = texts(tmp_path / "t.svg")
    assert [t for t in said if t.startswith("device ")] == [f"device {d}" for d in range(16)]
    assert {"compute", "transfers", "collectives", "launches", "critical path"} <= set(said)
    assert "waits" not in said and "simulated time in us" in said and "9 us" in said
    assert "devices, each row" in said and "as full as it is busy" in said
    # The names of hundreds of programs could not be read, that of what the device does can.
    assert said.count("allreduce") == 16 and not any(t.startswith("gemm") for t in said)


def test_the_same_timeline_makes_the_same_file(tmp_path: Path):
    plot(ring(), tmp_path / "one.svg")
    plot(ring(), tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_rows_of_engines(tmp_path: Path):
    plot(ring(2), tmp_path / "few.svg", engines=True)
    said = texts(tmp_path / "few.svg")
    assert said.count("block 0") == 2 and said.count("block 0 signals") == 2 and "waits" in said
    plot(grid(2), tmp_path / "many.svg", engines=True)
    said = texts(tmp_path / "many.svg")
    assert [t for t in said if t.startswith("block")] == ["block", "block ahead"] * 2


def test_of_many_units_some_are_shown(tmp_path: Path):
    plot(grid(100, 1), tmp_path / "t.svg")
    said = texts(tmp_path / "t.svg")
    assert "9 us, 25 of 100 devices shown" in said and "device 96" in said and "device 97" not in said


def test_bitmaps_are_written(tmp_path: Path):
    plot(ring(), tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    plot(replace(ring(), spans=(), end_s=0.0), tmp_path / "nothing.png")


def test_pictures_say_what_ran_where(tmp_path: Path):
    plot(replace(ring(4, 2), title="ring on h200-sxm-8"), tmp_path / "t.svg")
    assert "ring on h200-sxm-8: 10 us, at least 6 us by nvlink" in texts(tmp_path / "t.svg")


def test_an_svg_follows_its_readers_preference(tmp_path: Path):
    plot(ring(), tmp_path / "t.svg")
    drawn = ElementTree.parse(tmp_path / "t.svg").getroot()
    style = drawn.find("{*}style").text
    assert style.startswith("@media (prefers-color-scheme: dark){")
    assert all(colour in style for colour in (DARK.paper, DARK.ink, DARK.grid, DARK.waiting))
    assert drawn.find(".//{*}g[@id='paper']/{*}path") is not None, "the rule for the background has something to colour"


def test_dark_pictures_keep_the_colours_of_kinds(tmp_path: Path):
    plot(ring(), tmp_path / "light.svg")
    plot(ring(), tmp_path / "dark.svg", dark=True)
    light, dark = ((tmp_path / f"{name}.svg").read_text() for name in ("light", "dark"))
    assert LIGHT.paper in light and LIGHT.ink in light
    assert DARK.paper in dark and DARK.ink in dark and LIGHT.ink not in dark
    assert all(STYLE[span.kind][0].lower() in dark for span in ring().spans)


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match=r"cannot be drawn into 't.jpeg2'"):
        plot(ring(), tmp_path / "t.jpeg2")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match="pip install matplotlib"):
        plot(ring(), tmp_path / "t.png")


def test_timelines_beside_each_other_have_one_axis_of_time(tmp_path: Path):
    short, long = ring(2), grid(2, 132)
    compare({"short": short, "long": long}, tmp_path / "both.svg")
    text = (tmp_path / "both.svg").read_text(encoding="utf-8")
    assert text.count('id="axes_') == 2
    assert "<!-- short: " in text and "<!-- long: " in text
    with pytest.raises(UsageError, match="several timelines cannot be drawn into 'both.html'"):
        compare({"short": short, "long": long}, tmp_path / "both.html")
