# SPDX-License-Identifier: MIT
"""Measurements of algorithms become points of the shipped ones, and show the quality of choices."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cost.support import CALIBRATION
from tests.test_predictions import FOLDER
from tilescale.cost import calibrated
from tilescale.hda import Machine

H200 = Machine.load("h200-sxm-8")


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("choices")


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes measurements those that are shipped of every machine."""
    return lambda data: monkeypatch.setattr(calibrated, "_shipped", lambda name: data)


def row(contender: str, elements: int, us: float | None, **changed: Any) -> dict[str, Any]:
    known = {"work": "allreduce", "shape": [elements], "gpus": 2, "mode": "graph", "contender": contender, "us": us}
    return {**known, **changed}


def rows(times: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Rows of results from a map: bytes -> microseconds of one_shot and of two_shot."""
    names = ("tilescale one_shot", "tilescale two_shot")
    return [row(name, nbytes // 2, us) for nbytes, both in times.items() for name, us in zip(names, both, strict=True)]


def test_cases_are_the_times_in_graphs_preferred_algorithms_first(choices: ModuleType):
    given = [
        row("nccl", 8, 9.0), row("tilescale one_shot", 8, 3.0), row("tilescale two_shot", 8, None),
        row("nccl", 8, 50.0, mode="eager"), row("copy engine", 8, 1.0, work="put"),
    ]  # fmt: skip
    (case,) = choices.cases(given)
    assert (case.operation, case.units, case.nbytes, list(case.us.items())) == (
        "allreduce", 2, 16, [("one_shot", 3.0), ("nccl", 9.0)],
    )  # fmt: skip
    assert case.regret("nccl") == pytest.approx(2.0) and case.regret("one_shot") == 0


def test_points_are_of_the_sizes_of_calibrations_and_replace_those_of_before(choices: ModuleType):
    known = choices.cases(rows({4096: (3.0, 4.0), 8192: (3.0, 4.0)}))
    once = choices.shipped(CALIBRATION, known, "2027-01-02T00:00:00")
    before, *new = once.collectives
    assert (before,) == CALIBRATION.collectives and [point.nbytes for point in new] == [4096, 4096]
    assert all("2027-01-02" in point.source for point in new)
    assert choices.shipped(once, known, "2027-01-02T00:00:00") == once


def test_choices_follow_points_and_are_compared_where_none_is(choices: ModuleType, in_force: Any):
    """The lines of both algorithms cross between two points; at a size beyond it one of them was much faster."""
    known = choices.cases(rows({4096: (2.0, 4.0), 8192: (4.0, 5.0), 10000: (6.0, 3.0), 16384: (8.0, 5.0)}))
    in_force(choices.shipped(replace(CALIBRATION, collectives=()), known, "2027"))
    unseen = choices.unseen(known)
    assert [case.nbytes for case in unseen] == [8192, 10000]
    assert [choices.by_points(H200, case) for case in unseen] == ["one_shot", "two_shot"]
    assert choices.regrets_of(H200, unseen, choices.by_points) == [0, 0]
    assert [choices.by_description(H200, case) for case in unseen] == ["one_shot"] * 2
    first, *_, last = choices.table(H200, unseen).splitlines()[2:]
    assert first == "| allreduce | 2 | 2 | 0% | 1 | 100% |" and last.startswith("| all | 2 | 2 |")


def test_what_programs_are_not_given_is_not_chosen(choices: ModuleType):
    """The copy engine is taken where it is asked for; that another choice takes longer shows."""
    times = {"tilescale direct": 12.0, "nccl": 30.0, "tilescale copy_engine": 10.0}
    (case,) = choices.cases([row(name, 1 << 26, us, work="all_gather") for name, us in times.items()])
    assert {choose(H200, case) for choose in (choices.by_points, choices.by_description)} <= {"direct", "nccl"}
    assert choices.regrets_of(H200, [case], choices.by_points) == [pytest.approx(0.2)]


@pytest.mark.parametrize("path", [*(FOLDER / "results").glob("algorithms.json")], ids=lambda path: path.stem)
def test_what_is_shipped_and_on_the_page_is_what_was_measured(choices: ModuleType, path: Path):
    results = choices.json.loads(path.read_text(encoding="utf-8"))
    known, data = choices.cases(results["rows"]), calibrated.measured(H200)
    assert choices.shipped(data, known, results["date"]) == data, "run benchmarks/choices.py"
    unseen = choices.unseen(known)
    page = choices.PAGE.read_text(encoding="utf-8")
    assert choices.with_table(page, choices.table(H200, unseen)) == page, "run benchmarks/choices.py"
    regrets = choices.regrets_of(H200, unseen, choices.by_points)
    assert sum(regret <= choices.REGRET for regret in regrets) >= 0.95 * len(regrets)
