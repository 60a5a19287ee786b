# SPDX-License-Identifier: MIT
"""Estimates of held-out times: the committed ones are current, and close to the measured times."""

from __future__ import annotations

import importlib
import json
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
    assert count >= 300 and by_time <= 0.05 and close >= 0.94
    assert {group["machine"] for group in results["groups"]} == {"2 x H200", "2 x H100"}
    assert held_out.good_choices(results["choices"]) >= 0.95


def test_what_is_held_out_is_not_what_numbers_are_fitted_to(held_out: ModuleType):
    cases = held_out.operators("any_shape")
    fitted_to, others = held_out.halves(cases)
    assert len(cases) == 166 and len(fitted_to) == committed(held_out)["fitted_to"]
    assert not {case.what for case in fitted_to} & {case.what for case in others}
    data, unseen = held_out.unseen("h100-sxm-8")
    assert {case.nbytes for case in unseen} and not {p.nbytes for p in data.collectives} & {c.nbytes for c in unseen}


def test_committed_estimates_are_those_of_this_source(held_out: ModuleType):
    results = committed(held_out)
    operators, *collectives = (group["rows"] for group in results["groups"])
    _, cases = held_out.halves(held_out.operators("any_shape"))
    with use_machine(H200):
        assert held_out.operator_rows(H200, results["shares"], cases[::6]) == operators[::6]
    for machine, rows in zip(("h200-sxm-8", "h100-sxm-8"), collectives, strict=True):
        assert held_out.collective_rows(*held_out.unseen(machine)) == rows
    assert held_out.with_table(page := held_out.PAGE.read_text(encoding="utf-8"), held_out.table(results)) == page


def test_the_shares_that_are_fitted_are_those_of_the_times(held_out: ModuleType):
    """A fit to estimates returns the shares of their machine, for long and for short calls."""
    fitted_to, _ = held_out.halves(held_out.operators("any_shape"))
    shares = {"short": 0.8, "long": 0.66}
    both = [next(case for case in fitted_to if held_out.is_long(case) == long) for long in (False, True)]
    with use_machine(H200):
        rows = held_out.operator_rows(H200, shares, both)
        made = [replace(case, us=row["estimated"]) for case, row in zip(both, rows, strict=True)]
        assert held_out.fitted(H200, made) == shares
