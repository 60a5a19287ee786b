# SPDX-License-Identifier: MIT
"""Pages, comments and docstrings follow the writing rules of CONTRIBUTING.md, as far as `words.py` has patterns."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests import words

PENDING: dict[str, dict[str, int]] = {}
"""Tree -> how often it still breaks a rule. Numbers only decrease."""

FOUND = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in words.PRINTED))


def broken_rules(tree: str) -> tuple[Counter[str], list[str]]:
    """Return the number of a tree's violations of each rule, and their places for rules that hold for it."""
    count: Counter[str] = Counter()
    places = []
    for path in words.files(tree):
        texts = words.prose(path, path.read_text(encoding="utf-8"))
        found = words.broken(texts, words.RULES)
        if path.suffix == ".md":
            found["heading"] = [heading for heading in words.headings(texts) if words.NO_HEADING.match(heading)]
            found["long sentence"] = words.long_sentences(texts)
        for rule, excerpts in found.items():
            count[rule] += len(excerpts)
            if rule not in PENDING.get(tree, {}):
                places += [f"{path.relative_to(words.ROOT)} [{rule}] {excerpt}" for excerpt in excerpts]
    return count, places


@pytest.mark.parametrize("tree", words.TREES)
def test_texts_follow_the_rules(tree: str):
    count, places = broken_rules(tree)
    assert places == []
    allowed = PENDING.get(tree, {})
    assert {rule: n for rule, n in count.items() if n > allowed.get(rule, 0)} == {}


@pytest.mark.parametrize("name", words.RULES)
def test_a_rule_finds_its_example(name: str):
    assert list(words.broken([words.RULES[name].found], words.RULES)) == [name]


@pytest.mark.parametrize(
    "text",
    [
        '"number of tiles that a block computes.',
        '"whether ``stmt`` is a grid-dependency wait.',
        "there is no flag that it could wait for.",
        "of course it is.",
        "every block turns into a producer; in turn, its stores are drained.",
        "devices that own tensors; this rank's own rows, each of its own length",
        "people who know the field",
        "GEMM stands for general matrix multiplication",
    ],
)
def test_plain_english_is_accepted(text: str):
    assert words.broken([text.lower()], words.RULES) == {}


def test_texts_of_a_module():
    source = '"""Two\n    lines."""\nx = """text"""  # one\n# two\n# three `x y`\ny = "# no"\n\n# four\n'
    assert words.prose(Path("m.py"), source) == ['"Two lines.', "#one two three ``", "#four"]


def test_templates_of_programs_are_read():
    program = words.ROOT / "tilescale" / "cli" / "templates" / "program.py.txt"
    assert program in words.files("tilescale") and words.prose(program, program.read_text(encoding="utf-8"))


def test_texts_of_a_header():
    source = '// one\n// two\n#include "//no"\n/* three\n * four */\n'
    assert words.prose(Path("m.cuh"), source) == ["#one two", "#three four"]


def test_texts_of_a_page():
    page = "# Of\n\nOne\ntwo.\n- three\n\n```sh\nwho\n```\n| a | b |\n<!-- who -->\n"
    assert words.prose(Path("m.md"), page) == ["# Of", "One two.", "- three", "| a | b |"]
    assert [bool(words.NO_HEADING.match(x)) for x in words.headings(["# Of", "## Offsets", "One"])] == [True, False]
    assert words.long_sentences(["Word " * 41 + "end.", "| " + "word " * 50, "Word, " * 40]) == ["Word " * 41 + "end."]


@pytest.mark.parametrize("folder", ["docs", "examples", "tilescale", "tilelang_core"])
def test_printed_texts_use_the_terms_of_the_field(folder: str):
    """Pages and examples as they are; of packages, texts that can be printed."""
    paths = [path for tree in words.TREES for path in words.files(tree) if path.is_relative_to(words.ROOT / folder)]
    found = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        page = " ".join(text.lower().split())
        if path.suffix in {".py", ".md", ".ipynb"} and path.name != "architecture.md" and FOUND.search(page):
            texts = words.printed(text) if folder.startswith("tile") else [page]
            found[path.name] = [match for text in texts for match in FOUND.findall(text.lower())]
    assert {name: matches for name, matches in found.items() if matches} == {}


def test_printed_texts_of_a_module():
    source = '"""Nothing orders the."""\ndef f():\n    raise E(f"{x} tells " "the time")  # no room for'
    assert [text for text in words.printed(source) if FOUND.search(text.lower())] == ["... tells the time"]


def test_code_says_barrier_and_thread_group():
    """Comments, docstrings and names: where units wait for each other, and what groups of threads are called."""
    made_up = re.compile(r"_meets?\b|\bmeets?\(|[Mm]eeting|kind: lanes|\"lanes\"|_lanes_|\bLANES\b")
    found = {}
    for path in (path for tree in ("backends", "tilescale", "tilelang_core") for path in words.files(tree)):
        found[path.name] = made_up.findall(path.read_text(encoding="utf-8"))
    assert {name: matches for name, matches in found.items() if matches} == {}
