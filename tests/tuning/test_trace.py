# SPDX-License-Identifier: MIT
"""Idle time of a GPU by a trace, without one: of spans, and the profiler's thread."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tilescale.ops.operator import is_observed


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks" / "works")
    return importlib.import_module("device_trace")


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 1.0),
        ([(100, 300)], 0.0),
        ([(300, 400), (0, 100)], 0.5),
        ([(0, 400), (100, 200), (300, 500), (900, 1000)], 0.4),
    ],
)
def test_idle_is_what_no_span_covers(trace: ModuleType, spans: list[tuple[int, int]], share: float):
    assert trace.idle_share(spans) == pytest.approx(share)


def test_operators_do_not_see_the_profiler(trace: ModuleType, monkeypatch: pytest.MonkeyPatch):
    activities = SimpleNamespace(CUDA=torch.profiler.ProfilerActivity.CPU)
    monkeypatch.setattr(torch.profiler, "ProfilerActivity", activities)
    with trace.device_trace() as spans:
        assert not is_observed()
    assert spans == [], "nothing ran on a GPU"


def test_an_error_of_the_profiler_is_raised(trace: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.profiler, "profile", lambda **given: 1 / 0)
    with pytest.raises(ZeroDivisionError), trace.device_trace():
        pass
