# SPDX-License-Identifier: MIT
"""Idle time of a GPU by a trace, without one: of spans, and the profiler's thread."""

from types import SimpleNamespace

import pytest
import torch

from tilescale.ops.operator import somebody_looks
from tilescale.tuning.trace import device_trace, idle_share


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 1.0),
        ([(100, 300)], 0.0),
        ([(300, 400), (0, 100)], 0.5),
        ([(0, 400), (100, 200), (300, 500), (900, 1000)], 0.4),
    ],
)
def test_idle_is_what_no_span_covers(spans: list[tuple[int, int]], share: float):
    assert idle_share(spans) == pytest.approx(share)


def test_operators_do_not_see_the_profiler(monkeypatch: pytest.MonkeyPatch):
    activities = SimpleNamespace(CUDA=torch.profiler.ProfilerActivity.CPU)
    monkeypatch.setattr(torch.profiler, "ProfilerActivity", activities)
    with device_trace() as spans:
        assert not somebody_looks()
    assert spans == [], "nothing ran on a GPU"


def test_an_error_of_the_profiler_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.profiler, "profile", lambda **given: 1 / 0)
    with pytest.raises(ZeroDivisionError), device_trace():
        pass
