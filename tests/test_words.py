# SPDX-License-Identifier: MIT
"""What users read is in the field's terms: words that the project once made up for them do not come back.

Read are the pages, the examples with their comments, and every text in the code that can be printed. Docstrings and
comments of the code are for its authors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

RETIRED = {
    r"nothing orders the": "no happens-before between the",
    r"(?:no|any|every|some)body": "no rank, every device, other users: who it is",
    r"tells? the time": "predicts execution time",
    r"(?:ranks|devices|threads|blocks) meet|the meetings? (?:at|of)": "synchronize, a barrier",
    r"no room for": "exhausted, does not fit",
    r"inbox (?:of|has) two places": "double-buffered inbox",
    r"never written": "uninitialized",
    r"how the project is cut": "how the code is organized",
    r"now speaking of|a level to speak of|speaks? to its": "across, a T.Scale, sends to",
    r"lanes of (?:one|a|the) program": "thread groups",
    r"straight to whom": "directly to their destinations",
    r"pip install \W?tilescale": "an index has another project of that name: say what to install, or install a clone",
}
"""Pattern -> the field's word."""

FOUND = re.compile("|".join(rf"\b(?:{words})\b" for words in RETIRED), re.IGNORECASE)

FOR_AUTHORS = "architecture.md"


def pages() -> Iterator[Path]:
    """Texts that are read as they are, but for the page that is for authors."""
    yield from (page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md")
    made = ROOT / "docs" / "examples"
    yield from (p for p in (ROOT / "docs").rglob("*.md") if p.name != FOR_AUTHORS and made not in p.parents)
    for pattern in "*.py", "*.md", "*.ipynb":
        yield from (ROOT / "examples").rglob(pattern)


def printed(source: str) -> Iterator[str]:
    """The texts of a module without docstrings; parts of one f-string together."""
    tree = ast.parse(source)
    inner: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node not in inner:
            inner.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.value


def test_pages_and_examples_use_the_terms_of_the_field():
    found = {path: FOUND.findall(" ".join(path.read_text(encoding="utf-8").split())) for path in pages()}
    assert {path.relative_to(ROOT).as_posix(): words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("package", ["tilescale", "tilelang_core"])
def test_printed_texts_use_the_terms_of_the_field(package: str):
    sources = ((path, path.read_text(encoding="utf-8")) for path in (ROOT / package).rglob("*.py"))
    suspects = [(path, source) for path, source in sources if FOUND.search(source)]
    found = {path.name: [text for text in printed(source) if FOUND.search(text)] for path, source in suspects}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_what_is_read_of_a_module():
    source = '"""Nobody."""\ndef f():\n    """Somebody."""\n    raise E(f"{x} tells " "the time")  # everybody'
    assert [text for text in printed(source) if FOUND.search(text)] == ["... tells the time"]


def test_code_says_barrier_and_thread_group():
    """Comments, docstrings and names: where units wait for each other, and what groups of threads are called."""
    sources = (
        p
        for package in ("tilescale", "tilelang_core")
        for p in (ROOT / package).rglob("*.*")
        if "__pycache__" not in p.parts
    )
    code = (p for p in sources if p.suffix in {".py", ".cuh", ".yaml"})
    made_up = re.compile(r"\b_*[Mm]eetings?|\bmeets?\(|_meets?\b|kind: lanes|\"lanes\"|_lanes_|\bLANES\b")
    found = {p.name: made_up.findall(p.read_text(encoding="utf-8")) for p in code}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("words", ["Nobody knows", "no room for a tensor", "all ranks meet", "nothing orders the two"])
def test_retired_words_are_found(words: str):
    assert FOUND.search(words)
