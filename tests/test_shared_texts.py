# SPDX-License-Identifier: MIT
"""A program that one process of a run has lowered is found by the others."""

from pathlib import Path

from tests.shared_texts import SharedTexts
from tilelang_core.compile import GeneratedText


def test_a_text_is_found_by_other_processes(tmp_path: Path):
    one, other = SharedTexts(tmp_path), SharedTexts(tmp_path)
    key, made = ("def f(): ...", "cuda", "{}"), GeneratedText("text", 7)
    assert key not in other
    one[key] = made
    assert key in other and other[key] == made
    assert ("def g(): ...", "cuda", "{}") not in other
