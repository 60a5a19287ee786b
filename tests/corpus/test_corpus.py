# SPDX-License-Identifier: MIT
"""The emulator finds what is wrong in the corpus, and nothing where nothing is; the page has the tables of the results.

One run of each program, in the order that a run has by itself; tests/corpus/measure.py takes all orders.
"""

import json
from pathlib import Path

import pytest

from tests.corpus import measure
from tests.corpus.collection import KINDS, PROGRAMS
from tests.corpus.record import LEVELS, Bench, Program
from tests.page_tables import compare_tables

PAGE = Path(__file__).parents[2] / "docs" / "detection.md"


MISSED = {"count_in_two_steps[load and store]"}
"""Mistakes that leave no two accesses unordered."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_mistake_is_found_at_its_line_and_nothing_else(program: Program):
    outcome = Bench(program).run(None)
    places = [where.line for where in outcome.error.where] if outcome.error else []
    said = f"{program.error} was expected at lines {program.named}, and came {outcome.error!r} at {places}"
    assert outcome.right is (program.name not in MISSED), said


def test_labels_are_complete():
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names)) >= 150
    assert len(KINDS) == 9
    for kind in KINDS:
        assert {program.level for program in kind.programs} == set(LEVELS), kind.name
        assert {program.error is None for program in kind.programs} == {True, False}, kind.name
    unnamed = [program.name for program in PROGRAMS if program.error is not None and not program.named]
    assert not unnamed, "say by `# named` which line the error has to name"


def results() -> dict:
    return json.loads(measure.RESULTS.read_text(encoding="utf-8"))


def test_results_are_of_these_programs_and_as_good_as_required():
    rows = results()
    wrong = {program.name: program.error is not None for program in PROGRAMS}
    assert {name: row["wrong"] for name, row in rows.items()} == wrong, "run `python -m tests.corpus.measure`"
    found = measure.rates(rows.values())
    assert found["alarms"] == 0
    assert found["recall"] >= 0.98 and found["recall in own order"] >= 0.98


def test_tables_of_the_page_are_those_of_the_results():
    compare_tables(PAGE, measure.tables(results()))
