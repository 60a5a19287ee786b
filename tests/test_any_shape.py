# SPDX-License-Identifier: MIT
"""The benchmark of shapes drawn at random: what is drawn, and that its checks accept right results alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tilescale.ops import strategy
from tilescale.settings import settings
from tilescale.tuning.probes import WHOLE

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def any_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The works, on one emulated rank."""
    for folder in (BENCHMARKS, BENCHMARKS / "works"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    settings.cache_clear()
    found = importlib.import_module("any_shapes")
    monkeypatch.setattr(importlib.import_module("trials"), "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(importlib.import_module("scaled"), "multiplied", multiplied)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()
    settings.cache_clear()


def multiplied(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> torch.Tensor:
    return ((a.float() * of_a) @ (b.float() * of_b.t()).t()).bfloat16()


def test_shapes_are_many_and_multiples_of_nothing(any_shapes: Any):
    shapes = any_shapes.drawn(32, 24, 2)
    assert len(shapes) >= 200 and shapes == any_shapes.drawn(32, 24, 2) != any_shapes.drawn(33, 24, 2)
    assert {(s.work, s.dtype) for s in shapes} == {
        (work, dtype) for work in any_shapes.WORKS for dtype in ("bfloat16", "float8_e4m3fn")
    }
    assert all(1 <= s.m <= any_shapes.MOST_ROWS and s.n % 16 == s.k % 16 == 0 for s in shapes)
    assert sum(s.m % 64 == 0 for s in shapes) < len(shapes) / 10
    assert min(s.m for s in shapes) < 8 and max(s.m for s in shapes) > 8192


def test_groups_have_more_calls_where_the_host_limits_them(any_shapes: Any):
    def calls(m: int, mode: str) -> int:
        return any_shapes.Gathered(any_shapes.Shape("ag_gemm", m, 8192, 8192, "bfloat16")).heat(mode, False).calls

    assert calls(2, "eager") == 20 and calls(16384, "eager") == 4
    assert calls(2, "graph") == 4 and calls(16384, "graph") == 2


def test_held_out_times_are_of_new_weights_and_sizes(any_shapes: Any):
    draw = importlib.import_module("held_out_times")
    drawn, measured = draw.shapes(138, 8, 2), any_shapes.drawn(32, 24, 2)
    assert [len(same) for same in drawn] == [draw.ROWS] * 8 and drawn != draw.shapes(139, 8, 2)
    weights = [{(s.work, s.n, s.k, s.dtype) for s in same} for same in (*drawn, measured)]
    assert not set().union(*weights[:-1]) & weights[-1]
    sizes = [nbytes for _, nbytes in draw.sizes(138)]
    assert 4 * 1024 < min(sizes) < max(sizes) < 256 << 20 and not set(sizes) & set(WHOLE)
    assert {nbytes % 4096 == 0 for nbytes in sizes} == {True, False}


@pytest.mark.parametrize("work", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_held_out_operators_take_both_strategies(work: str, any_shapes: Any, monkeypatch: pytest.MonkeyPatch):
    draw, taken = importlib.import_module("held_out_times"), []
    made = any_shapes.WORKS[work]
    ours = made.ours
    monkeypatch.setattr(made, "ours", lambda *given: [taken.append(strategy.overlaps(None, None)), ours(*given)][1])
    monkeypatch.setattr(strategy, "overlaps", None)
    for contender in draw.operator(any_shapes.Shape(work, 34, 48, 64, "bfloat16")).contenders:
        contender.make().check(0)
    assert taken == [True, False]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("work", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_right_results_alone_are_timed(work: str, dtype: str, any_shapes: Any, monkeypatch: pytest.MonkeyPatch):
    made = any_shapes.WORKS[work](any_shapes.Shape(work, 34, 48, 64, dtype))
    monkeypatch.setattr(any_shapes, "SETTLED", 2)
    made.settle(True)
    libraries, ours = (contender.make() for contender in made.heat("eager", False).contenders)
    for runner in (libraries, ours):
        runner.check(0)
        runner.call()
    assert libraries.way is None and ours.way() == "beside", "a single rank has nothing to wait for"
    made.ours = lambda *given: made.libraries(*given) * 1.5
    with pytest.raises(ValueError, match="wrong"):
        made.heat("eager", False).contenders[-1].make().check(0)
