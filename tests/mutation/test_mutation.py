# SPDX-License-Identifier: MIT
"""Mutants are as documented, the files and tests of the score exist, and the score is as required."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.operators import cuda_mutants, python_mutants
from tests.mutation.table import CAUGHT, RESULTS, SURVIVES, TIMEOUT, score, tables
from tests.mutation.targets import ROOT, TARGETS, Target
from tests.page_tables import compare_tables

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "mutants.md"

PYTHON = """
def waits(flags, limit) -> bool:
    flags.settle()  # über
    if not flags.open and limit < max(flags.values):
        return flags.first + flags.step == limit
    return False
"""

CUDA = """
// release, as ld.acquire.sys has it
void drain() {
  complete_stores();
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
"""


def test_mutants_of_python_are_made_at_one_place_each():
    mutants = list(python_mutants(PYTHON))
    assert sorted(mutant.what for mutant in mutants) == [
        "False -> True",
        "flags.first + flags.step -> max(flags.first, flags.step)",
        "flags.first + flags.step == limit -> False",
        "flags.first + flags.step == limit -> True",
        "flags.first + flags.step == limit -> flags.first + flags.step != limit",
        "flags.settle() -> pass",
        "limit < max(flags.values) -> limit <= max(flags.values)",
        "max -> min",
        "not flags.open -> flags.open",
        "not flags.open and limit < max(flags.values) -> (not flags.open or limit < max(flags.values))",
    ]
    for mutant in mutants:
        ast.parse(mutant.text)
        before, after = (text.splitlines() for text in (PYTHON, mutant.text))
        changed = [number for number, (a, b) in enumerate(zip(before, after, strict=True), start=1) if a != b]
        assert changed == [mutant.line]


def test_some_functions_of_a_module():
    text = "def one() -> int:\n    return 1\n\n\ndef two() -> int:\n    return 2\n"
    assert [mutant.what for mutant in python_mutants(text, ["two"])] == ["2 -> 0"]


def test_mutants_of_cuda_weaken_or_delete():
    assert [(mutant.line, mutant.what.rpartition(": ")[2]) for mutant in cuda_mutants(CUDA)] == [
        (6, "release -> relaxed"),
        (5, "sys -> gpu"),
        (6, "sys -> gpu"),
        (4, "complete_stores(); -> nothing"),
        (5, '"memory"); -> nothing'),
    ]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.path)
def test_targets_have_mutants_and_tests(target: Target):
    assert any(True for _ in target.mutants())
    for test in target.tests:
        path, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}" in (ROOT / path).read_text(encoding="utf-8")


BODIES = {
    "pass": SURVIVES,
    "assert False": CAUGHT,
    "signal.raise_signal(signal.SIGXCPU)": TIMEOUT,  # as at the limit of CPU time
    "time.sleep(600)": TIMEOUT,
}


def test_tests_that_do_not_end_are_a_timeout(tmp_path: Path):
    """In a process that is not forked from one that runs tests."""
    for number, body in enumerate(BODIES):
        text = f"import signal, time\n\n\ndef test_body():\n    {body}\n"
        (tmp_path / f"test_{number}.py").write_text(text, encoding="utf-8")
    script = (
        "from pathlib import Path\n"
        "from tests.mutation import session\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"for number in range({len(BODIES)}):\n"
        f"    session.LIMIT_S = 200 if number < {len(BODIES) - 1} else 3\n"
        "    print(session.outcome_of((str(folder / f'test_{number}.py'),), folder))\n"
    )
    given = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, timeout=700)
    assert done.stdout.split() == list(BODIES.values()), done.stderr


MODULE = """
from functools import cache


def half(number) -> int:
    return number // 2


def double(number) -> int:
    return number + number


FOUR = double(2)


def macro(function):
    return function


@macro
def third(number) -> int:
    return number // 3


class Counter:
    @property
    @cache
    def limit(self) -> int:
        return 1 + double(3)
"""

TESTS = """
from module import FOUR, Counter, double, half, third


def test_four():
    assert FOUR == 4


def test_limit():
    assert Counter().limit == 7


def test_half():
    assert half(5) == 2


def test_third():
    assert third(7) == 2
"""

MUTANTS = {
    "number // 2 -> 0": CAUGHT,
    "number + number -> 0": None,  # it has been executed when the module was imported
    "number + number -> max(number, number)": None,
    "number // 3 -> 0": None,  # its source is rewritten
    "1 + double(3) -> 0": CAUGHT,
    "1 + double(3) -> max(1, double(3))": CAUGHT,
}


def test_a_session_runs_its_tests_with_the_code_of_each_mutant(tmp_path: Path):
    """In a process that is not forked from one that runs tests."""
    (tmp_path / "module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "test_module.py").write_text(TESTS, encoding="utf-8")
    script = (
        "from pathlib import Path\n"
        "from tests.mutation.operators import python_mutants\n"
        "from tests.mutation.session import Session\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "text = (folder / 'module.py').read_text()\n"
        "session = Session(('test_module.py',), folder / 'module.py', folder)\n"
        "assert session.passes\n"
        "print({mutant.what: session.outcome(mutant.line, mutant.text) for mutant in python_mutants(text)})\n"
        "assert session.outcome(1, text) == 'survives'\n"
        "session.close()\n"
    )
    given = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(MUTANTS), done.stderr
    assert (tmp_path / "module.py").read_text(encoding="utf-8") == MODULE


def test_the_table_tells_timeouts_from_what_is_caught():
    path = TARGETS[0].path
    rows = [{"line": 7, "what": "a -> b", "outcome": outcome} for outcome in (CAUGHT, CAUGHT, SURVIVES, TIMEOUT)]
    made = tables({path: {"of": 9, "tried": rows}})
    assert made["mutants"].splitlines()[-1] == "| all | 9 | 4 | 2 | 0 | 1 | 50.0 % |"
    assert made["survivors"] == f"- `{path}`, line 7: `a -> b`\n- `{path}`, line 7 (timeout): `a -> b`"


def test_equivalent_mutants_are_told_from_survivors_and_do_not_count():
    path = TARGETS[0].path
    rows = [{"line": 7, "what": what, "outcome": o} for what, o in (("a", SURVIVES), ("b", SURVIVES), ("c", CAUGHT))]
    made = tables({path: {"of": 3, "tried": rows}}, {path: {"a": "same value", "c": "has been caught since"}})
    assert made["mutants"].splitlines()[-1] == "| all | 3 | 3 | 1 | 1 | 0 | 50.0 % |"
    assert made["survivors"] == f"- `{path}`, line 7: `b`"
    assert made["equivalent"] == f"- `{path}`, line 7: `a`: same value"


def test_the_score_is_what_is_required_and_on_its_page():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(results) <= {target.path for target in TARGETS}
    assert score(results) >= 0.95
    compare_tables(PAGE, tables(results))
    survive = {(path, row["what"]) for path, of in results.items() for row in of["tried"] if row["outcome"] != CAUGHT}
    assert {(path, what) for path, reasons in EQUIVALENT.items() for what in reasons} <= survive
