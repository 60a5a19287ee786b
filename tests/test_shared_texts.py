# SPDX-License-Identifier: MIT
"""A program that one process of a run has lowered is found by the others."""

from pathlib import Path

import pytest

from tests.shared_texts import SharedTexts
from tilelang_core.compile import GeneratedText


def test_a_text_is_found_by_other_processes(tmp_path: Path):
    one, other = SharedTexts(tmp_path), SharedTexts(tmp_path)
    key, made = ("def f(): ...", "cuda", "{}"), GeneratedText("text", 7)
    assert one.made(key, lambda: made) == made
    assert other.made(key, lambda: pytest.fail("the text is made twice")) == made
    others = GeneratedText("other", 0)
    assert other.made(("def g(): ...", "cuda", "{}"), lambda: others) == others
