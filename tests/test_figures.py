# SPDX-License-Identifier: MIT
"""The figures of the pages are those that `docs/figures` draws, one for every example, in one style."""

from __future__ import annotations

import os
import re
from html import unescape

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from docs.figures import EXAMPLES, FOLDER, drawn
from docs.figures.style import DARK, LIGHT, Figure
from tests.ladder import NUMBERED

FILES = drawn()


@pytest.mark.parametrize("name", FILES)
def test_the_committed_figure_is_what_is_drawn(name: str):
    if os.environ.get("UPDATE_DOCS"):
        (FOLDER / name).write_text(FILES[name], encoding="utf-8")
    assert (FOLDER / name).read_text(encoding="utf-8") == FILES[name], "if this is meant: python -m docs.figures"


def test_every_example_has_a_figure():
    assert EXAMPLES.keys() == NUMBERED.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_figure_has_a_title_and_no_colour_of_its_own(name: str):
    assert re.search(r"<title>\w.*?</title>", FILES[name])
    assert not re.search(r"#[0-9a-f]{6}", re.sub(r"<style>.*?</style>", "", FILES[name]))


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_drawn_outside_a_figure(name: str):
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', FILES[name]).groups())
    for kind, x, y, w, h in re.findall(r'<(rect) x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', FILES[name]):
        assert 0 <= float(x) <= width - float(w) and 0 <= float(y) <= height - float(h), kind
    for x, y, rest, text in re.findall(r'<text x="(\S+)" y="(\S+)"([^>]*)>([^<]+)<', FILES[name]):
        left, right = ends(float(x), rest, unescape(text))
        assert 0 <= left and right <= width and 0 <= float(y) <= height, text


def ends(x: float, attributes: str, text: str) -> tuple[float, float]:
    """Left and right end of a figure's text in DejaVu Sans, wider than most default fonts of browsers."""
    size, anchor = (re.search(rf'{name}="(\S+?)"', attributes)[1] for name in ("font-size", "text-anchor"))
    font = FontProperties(family="DejaVu Sans", size=float(size))
    length, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
    return left, left + length


def test_both_themes_have_every_colour():
    assert LIGHT.keys() == DARK.keys()


def test_a_figure_that_a_phone_cannot_show_is_refused():
    with pytest.raises(ValueError, match="a phone shows up to 480"):
        Figure("too wide", 481, 10)
