# SPDX-License-Identifier: MIT
"""The emulator finds the mistakes of the corpus, and reports none in correct programs; the page has the tables.

One run of each program, in the default order; tests/corpus/measure.py takes all orders.
"""

import inspect
import json
import traceback
from pathlib import Path
from typing import Any

import pytest

import tilescale.language as T
from tests.corpus import measure
from tests.corpus.collection import KINDS, PROGRAMS
from tests.corpus.record import LEVELS, Bench, Program
from tests.page_tables import compare_tables

PAGE = Path(__file__).parents[2] / "docs" / "detection.md"


MISSED = {"count_in_two_steps[load and store]", "payloads_of_three_writers[one too few]"}
"""Mistakes that leave no two accesses of this order unordered."""

REDUNDANT = {
    "ring_of_waits[signal]",
    "ring_of_waits[one starts]",
    "signals_of_the_others[all but one]",
    "two_flags[in order]",
    "signal_that_takes_another_away[add]",
    "warpgroups_of_two_devices[in order]",
}
"""Correct programs that only wait: no access needs the waits."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_mistake_is_found_at_its_line_and_nothing_else(program: Program):
    outcome = Bench(program).run(None)
    places = [where.line for where in outcome.error.where] if outcome.error else []
    said = f"{program.error} was expected at lines {program.named}, and came {outcome.error!r} at {places}"
    assert outcome.right is (program.name not in MISSED), said
    assert bool(outcome.redundant) is (program.name in REDUNDANT), "these waits can be left out, it says"


@pytest.mark.parametrize("name", sorted(REDUNDANT))
def test_waits_that_are_said_to_be_redundant_can_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without them no check reports an error in several orders, and the values are the same."""
    (program,) = (program for program in PROGRAMS if program.name == name)
    wanted = Bench(program).run(None)
    wait, left_out = T.wait, []

    def needed(*given: Any) -> Any:
        line = next(f.lineno for f in traceback.extract_stack()[::-1] if f.filename == inspect.getfile(program.make))
        if line not in wanted.redundant:
            return wait(*given)
        return left_out.append(line)

    monkeypatch.setattr(T, "wait", needed)
    bench = Bench(program)
    assert set(left_out) == wanted.redundant
    for outcome in map(bench.run, (None, 0, 1, 2)):
        assert outcome.right and measure.same(outcome.values, wanted.values)


def test_labels_are_complete():
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names)) >= 150
    assert len(KINDS) == 10
    for kind in KINDS:
        levels = {"thread"} if kind.name == "race of threads" else set(LEVELS) - {"thread"}
        assert {program.level for program in kind.programs} == levels, kind.name
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
