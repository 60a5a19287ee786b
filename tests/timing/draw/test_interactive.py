# SPDX-License-Identifier: MIT
"""Interactive timelines: the page's data, and that the page needs no other file."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.timing.draw.timelines import US, grid, ring
from tilescale.errors import DependencyError
from tilescale.timing.draw import columns, page, plot
from tilescale.timing.draw.columns import TimelineColumns
from tilescale.timing.draw.picture import ORDER, STYLE
from tilescale.timing.timeline import Copies, Span, Timeline


def test_a_page_is_one_file_that_asks_no_host(tmp_path: Path):
    plot(replace(ring(4, 2), title="ring <on> h200-sxm-8"), tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "ring &lt;on&gt; h200-sxm-8: 10 us" in outside and "critical path   9 steps" in outside
    assert not re.search(r"(src|href)\s*=|@import|url\(", outside)
    assert not re.search(r"<script[^>]*\bsrc\b", text)
    assert len(text) < 2_500_000


def test_a_notebook_shows_it_in_a_frame():
    drawn = page(replace(ring(), title="ring on h200-sxm-8"))
    assert drawn._repr_html_().startswith('<iframe srcdoc="') and drawn._repr_html_().count("<") == 2
    assert repr(drawn) == "<Page: timeline of ring on h200-sxm-8; a notebook shows it, save(path) writes it>"
    assert page(ring(), unfolded=True).rows > drawn.rows == 8


def test_a_step_is_told_with_its_line_and_what_it_waited_for():
    found = TimelineColumns(ring())
    data = found.sources(False)["spans"]
    tips = [found.tips[number] for number in data["tip"]]
    assert len(tips) == len(ring().spans) and len(found.tips) < len(tips)
    wait = "wait: wait for flag[0] >= 1\ndevice 2, block 0\nprogram.py:8\nwaited for signal of device 1, block 0"
    assert wait in tips and "transfer: copy\ndevice 0, block 0\nprogram.py:7\nafter launch of device 0" in tips
    copy = next(i for i, tip in enumerate(tips) if tip.startswith("transfer"))
    assert (data["left"][copy], data["right"][copy], data["nbytes"][copy]) == (1.0, 3.0, 4000)


def test_lanes_of_a_unit_do_not_overlap():
    found = TimelineColumns(grid(3, 12))
    data = found.sources(False)["spans"]
    assert found.track_counts == [12 + 2 * 12 + 1] * 3
    for unit, track in {(int(u), int(n)) for u, n in zip(data["unit"], data["track"], strict=True)}:
        mine = (data["unit"] == unit) & (data["track"] == track)
        order = np.argsort(data["left"][mine])
        assert (data["right"][mine][order][:-1] <= data["left"][mine][order][1:] + 1e-3).all()


def test_a_folded_unit_is_as_full_as_it_is_busy():
    data = TimelineColumns(grid(2, 132)).sources(False)["shares"]
    at = [(d, k) for d, k, left, right in zip(*(data[c] for c in ("unit", "kind", "left", "right")), strict=True) if
          left <= 5.5 < right]  # fmt: skip
    assert at == [(0, "compute"), (1, "compute")]
    busy = (data["left"] <= 5.5) & (5.5 < data["right"])
    np.testing.assert_allclose(data["share"][busy], 1 / 3, rtol=1e-5)
    assert (data["high"] <= 1 + 1e-6).all() and set(data["colour"]) <= {STYLE[kind][0] for kind in ORDER}


def test_a_share_of_a_folded_unit_names_its_steps():
    found = TimelineColumns(ring())
    data = found.sources(False)["shares"]
    sending = (data["unit"] == 0) & (np.array(data["kind"]) == "transfers")
    sending &= (data["left"] <= 2.0) & (2.0 < data["right"])
    assert [found.share_tips[number] for number in data["tip"][sending]] == ["device 0\ncopy  program.py:7"]
    many = TimelineColumns(grid(2, 132))
    assert many.sources(False) and any(tip.endswith("  x132") for tip in many.share_tips)
    html = page(ring()).html
    assert "@kind: @share{0 %}, from @left" in html and "copy  program.py:7" in html


def test_the_critical_path_goes_from_unit_to_unit():
    data = TimelineColumns(ring(4, 2)).sources(False)["path"]
    assert (np.diff(data["x"]) >= 0).all() and data["x"][-1] == 10.0
    assert len(set(data["unit"])) == 3


def test_names_stand_at_the_first_lane_of_an_engine():
    data = TimelineColumns(grid(1, 2)).sources(True)["labels"]
    assert list(zip(data["track"], data["name"], strict=True)) == [
        (-1, "device 0"), (6, "device"), (1, "block 0 ahead"), (0, "block 0"), (4, "block 1 ahead"), (3, "block 1")
    ]  # fmt: skip


def test_of_many_steps_the_longest_and_the_critical_ones_are_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns, "MOST_SPANS", 20)
    timeline = ring(4, 3)
    found = TimelineColumns(timeline)
    assert found.there == len(timeline.spans) > len(found.numbers) == 20
    assert set(timeline.critical_numbers) <= set(found.numbers)
    left_out = [span for span in timeline.spans if span not in found.spans]
    rest = [span for span in found.spans if span not in timeline.critical_path]
    assert max(span.seconds for span in left_out) <= min(span.seconds for span in rest)
    assert f"The 20 longest of {found.there} steps are drawn." in page(timeline).html


def test_of_many_units_some_are_shown():
    found = TimelineColumns(grid(100, 1))
    assert list(found.units) == list(range(0, 100, 4)) and set(found.sources(False)["spans"]["unit"]) == set(range(25))


def test_units_that_do_the_same_are_drawn_each():
    first = [Span(0, "block 0", "device 0, block 0", "gemm", "compute", 0.0, US)]
    data = TimelineColumns(Timeline("device", Copies(first, ("device 0", "device 1")), (), US)).sources(False)
    assert list(data["spans"]["unit"]) == [0, 1] and list(data["path"]["unit"]) == [0, 0]


def test_nothing_happened():
    assert page(Timeline("device", (), (), 0.0)).rows == 2


def test_without_bokeh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bokeh.document", None)
    with pytest.raises(DependencyError, match="pip install bokeh"):
        page(ring())
