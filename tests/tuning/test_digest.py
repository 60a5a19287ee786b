# SPDX-License-Identifier: MIT
"""A digest changes with all that a function uses, and only with that."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tilescale.tuning.digest import source_digest

TEXT = """
import functools
import math

TILE = 64
OTHER = 3

def helper(n):
    return inner(n) + 1

def inner(n):
    return n * TILE

def around(width):
    def function(n):
        def nested():
            return helper(n) * width
        return nested() + math.sqrt(n)
    return function

function = around(16)
wrapped = functools.lru_cache(function)
"""


def digest(folder: Path, text: str = TEXT, name: str = "function") -> str:
    """Of a function of a module with this text."""
    folder.mkdir(exist_ok=True)
    path = folder / f"module_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return source_digest(getattr(module, name))


def test_the_same_text_has_the_same_digest(tmp_path: Path):
    assert digest(tmp_path) == digest(tmp_path) == digest(tmp_path, name="wrapped")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nested() + math", "nested() - math"),
        ("helper(n) * width", "helper(n) + width"),
        ("inner(n) + 1", "inner(n) + 2"),
        ("n * TILE", "n + TILE"),
        ("TILE = 64", "TILE = 128"),
        ("around(16)", "around(32)"),
    ],
)
def test_whatever_it_uses_counts(tmp_path: Path, old: str, new: str):
    assert old in TEXT and digest(tmp_path) != digest(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("OTHER = 3", "OTHER = 4"), ("import math", "import math  # roots")])
def test_nothing_else_does(tmp_path: Path, old: str, new: str):
    assert digest(tmp_path) == digest(tmp_path, TEXT.replace(old, new))


def test_circles_end(tmp_path: Path):
    text = "def function(n):\n    return other(n)\n\ndef other(n):\n    return function(n - 1)\n"
    assert digest(tmp_path, text) != digest(tmp_path, text.replace("n - 1", "n - 2"))


USES = """
import helper
import package.inner as inside

SHAPE = [128, {"depth": 2}]

class Plan:
    stages = 3
    def steps(self, n):
        return n * self.width

plan = Plan()
plan.width = 4

def twice(n, by=helper.FACTOR):
    return by * n

def function(n):
    return helper.loops(n) + inside.deep(SHAPE[0]) + plan.steps(n) + twice(n)
"""

HELPER = "DEPTH = 64\nFACTOR = 2\ndef loops(n):\n    return n * DEPTH\ndef unused(n):\n    return n\n"
DEEP = "def deep(n):\n    return n + 1\n"
ASK = "from tilescale.tuning.digest import source_digest; import program; print(source_digest(program.function))"


def in_a_process(folder: Path, old: str = "", new: str = "") -> str:
    """The digest of `USES` as a process of its own has it, with a text replaced in its modules."""
    (folder / "package").mkdir(exist_ok=True)
    for name, text in (("program", USES), ("helper", HELPER), ("package/inner", DEEP), ("package/__init__", "")):
        (folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
    asked = [sys.executable, "-B", "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {ASK}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def test_modules_containers_and_objects_count(tmp_path: Path):
    known = in_a_process(tmp_path)
    assert known == in_a_process(tmp_path)
    for old, new in (
        ("n * DEPTH", "100 * n"),
        ("DEPTH = 64", "DEPTH = 32"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("n + 1", "n + 2"),
        ("[128, ", "[64, "),
        ('"depth": 2', '"depth": 4'),
        ("plan.width = 4", "plan.width = 8"),
        ("n * self.width", "n + self.width"),
        ("stages = 3", "stages = 4"),
    ):
        assert old in USES + HELPER + DEEP and in_a_process(tmp_path, old, new) != known, old
    assert in_a_process(tmp_path, "return n\n", "return -n\n") == known  # unused
