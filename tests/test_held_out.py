# SPDX-License-Identifier: MIT
"""Estimates of held-out times: the committed ones are current, and close to the measured times."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from types import ModuleType

import pytest

from tests.test_predictions import FOLDER
from tilescale.hda import Machine
from tilescale.hda.current import use_machine

H200 = Machine.load("h200-sxm-8")


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("held_out")


def committed(held_out: ModuleType) -> dict:
    return json.loads(held_out.RESULTS.read_text(encoding="utf-8"))


def test_estimates_of_held_out_times_are_close(held_out: ModuleType):
    results = committed(held_out)
    every = [row for group in results["groups"] for row in group["rows"]]
    count, by_time, _, close = held_out.summary(every)
    assert count >= 290 and by_time <= 0.08 and close >= 0.94
    assert {group["machine"] for group in results["groups"]} == {"2 x H200", "2 x H100"}
    assert held_out.good_choices(results["choices"]) >= 0.95


@pytest.mark.parametrize("draw", ["second", "third", "fourth", "fifth"])
def test_estimates_of_later_draws_are_as_close(held_out: ModuleType, draw: str):
    later = committed(held_out)[draw]
    count, by_time, _, close = held_out.summary([row for group in later["groups"] for row in group["rows"]])
    assert count >= 200 and by_time <= 0.06 and close >= 0.945
    assert held_out.good_choices(later["choices"]) >= 0.95


def test_estimates_of_all_draws_are_close(held_out: ModuleType):
    every = held_out.together(committed(held_out))
    count, by_time, _, close = held_out.summary([row for group in every["groups"] for row in group["rows"]])
    assert count >= 1150 and by_time <= 0.08 and close >= 0.95
    assert held_out.good_choices(every["choices"]) >= 0.95


def test_what_is_held_out_is_not_what_numbers_are_fitted_to(held_out: ModuleType):
    names = "any_shape", held_out.FIRST_DRAW, *held_out.LATER_DRAWS.values()
    fitted_to, *others = cases = [held_out.operators(name) for name in names]
    assert len(fitted_to) == committed(held_out)["fitted_to"] == 217 and all(len(of) >= 96 for of in others)
    weights = [{case.what.rpartition(",")[0] + case.what.partition(" x ")[2] for case in of} for of in cases]
    assert len(set().union(*weights)) == sum(map(len, weights))
    drawn = [("h200-sxm-8", draw) for draw in names[1:]]
    for machine, draw in (*drawn, ("h100-sxm-8", "")):
        data, unseen = held_out.unseen(machine, draw)
        assert unseen and not {p.nbytes for p in data.collectives} & {case.nbytes for case in unseen}


def test_committed_estimates_are_those_of_this_source(held_out: ModuleType):
    results = committed(held_out)
    later = [(draw, results[name]) for name, draw in held_out.LATER_DRAWS.items()]
    for draw, part in ((held_out.FIRST_DRAW, results), *later):
        operators, *collectives = (group["rows"] for group in part["groups"])
        with use_machine(H200):
            cases = held_out.operators(draw)[::6]
            assert held_out.operator_rows(H200, results["shares"], cases) == operators[::6]
        for machine, rows in zip(("h200-sxm-8", "h100-sxm-8"), collectives, strict=False):
            assert held_out.collective_rows(*held_out.unseen(machine, draw)) == rows
    pages = [page.read_text(encoding="utf-8") for page in held_out.PAGES]
    assert [held_out.with_tables(page, results) for page in pages] == pages
    draws = {"held_out", "held_out_all", *(f"held_out_{name}" for name in held_out.LATER_DRAWS)}
    assert draws <= set(re.findall(r"<!-- measured: (\w+) -->", "".join(pages)))


def test_the_share_that_is_fitted_is_that_of_the_times(held_out: ModuleType):
    """A fit to estimates returns the share of the peak of each type."""
    cases = sorted(held_out.operators("any_shape"), key=lambda case: case.us)[-24:]
    shares = {"bfloat16": 0.85, "float8_e4m3fn": 0.77}
    with use_machine(H200):
        rows = held_out.operator_rows(H200, shares, cases)
        made = [replace(case, us=row["estimated"]) for case, row in zip(cases, rows, strict=True)]
        assert held_out.fitted(H200, made) == shares
