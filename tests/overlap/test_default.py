# SPDX-License-Identifier: MIT
"""Default schedule of a kernel."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.ladder import NUMBERED, load
from tests.overlap.support import H200, check_same, line, overlapped
from tests.overlap.test_gather import gather_then_scale
from tilescale.errors import PhaseError, RaceError, UsageError
from tilescale.passes.overlap.estimate import pays
from tilescale.passes.overlap.schedule import Move
from tilescale.tuning import programs

LARGE = (16384, 2048, 2048)
"""M, N and K of a GEMM that hides its gather."""


def test_it_overlaps_where_that_pays():
    program = programs.gather_and_gemm(H200, 2, LARGE)
    kernel, in_order = (tilescale.compile(program, machine=H200, **given) for given in ({}, {"schedule": "sequential"}))
    assert kernel.moves.moves[0].overlapped and in_order.moves is None and in_order.ir is program
    assert "overlapped, " in kernel.schedule and "collectives" not in in_order.schedule
    times = [tilescale.emulate(k.ir, machine=H200, data=False).time_us for k in (kernel, in_order)]
    assert times[0] < 0.9 * times[1]


def test_small_programs_stay_as_they_are():
    program = gather_then_scale(4, 8, 4)
    kernel = tilescale.compile(program, machine=H200)
    assert kernel.ir is program and "sequential: it is not estimated to save time" in kernel.schedule


def test_what_saves_next_to_nothing_does_not_pay():
    moves = [Move("all_gather", ("X", "Y"), in_order_s=1e-4, overlapped_s=s) for s in (97e-6, 99e-6)]
    assert [pays(move) for move in moves] == [True, False]


@pytest.mark.parametrize(("field", "value"), [("carrier", "tiles"), ("carrier", "queue"), ("adds", "grid")])
def test_what_only_reductions_have_is_refused_elsewhere(field: str, value: str):
    program = programs.gather_and_gemm(H200, 2, LARGE)
    schedule = tilescale.compile(program, machine=H200).moves
    setattr(schedule.moves[0], field, value)
    with pytest.raises(UsageError, match=f"all_gather A -> G: {field}='{value}' is for reductions") as caught:
        tilescale.compile(program, machine=H200, schedule=schedule)
    assert f"set {field}=None" in str(caught.value)


def test_programs_without_such_collectives_are_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("tilescale.runtime.bound_program")
    monkeypatch.setattr(module, "overlap", lambda *given: pytest.fail("it was looked at"))
    for program in (load(NUMBERED[6]).tile_by_tile(4, 256, 256, 256), programs.product(H200, 1, (256, 256, 256))):
        kernel = tilescale.compile(program, machine=H200)
        assert kernel.ir is program and kernel.moves.moves == [] and "collectives" not in kernel.schedule


def gather_and_race() -> Any:
    """A gather, then blocks that read tiles of it; each also writes the same element, another value."""

    @T.prim_func
    def f(X: T.Tensor((16, 8), "float32"), Y: T.Tensor((64, 8), "float32"), last: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, block=16, threads=32) as b:
            whole = T.alloc((64, 8), "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, whole)
            with T.Scale("block"):
                for i, j in T.Parallel(4, 8):
                    Y[b * 4 + i, j] = whole[b * 4 + i, j]
                last[0] = b

    return f


def test_errors_of_a_run_name_the_line_that_was_written():
    program = gather_and_race()
    changed, schedule = overlapped(program)
    assert schedule.moves[0].overlapped
    args = [[torch.ones(16, 8), torch.zeros(64, 8), torch.zeros(1, dtype=torch.int32)] for _ in range(4)]
    for func in (program, changed):
        with pytest.raises(RaceError) as caught:
            tilescale.emulate(func, args, machine=H200)
        assert {where.line for where in caught.value.where} == {line(gather_and_race, "last[0] = b")}


def test_mistakes_are_told_of_what_was_written():
    @T.prim_func
    def f(X: T.Tensor((16, 8), "float32"), Y: T.Tensor((64, 8), "float32")):
        with T.Kernel(device=4, block=16, threads=32) as b:
            whole = T.alloc((64, 8), "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, whole)
                T.copy(whole[b * 4, 0], Y[b * 4, 0])  # a device has no block

    for schedule in ("overlap", "sequential"):
        with pytest.raises(PhaseError) as caught:
            tilescale.compile(f, machine=H200, schedule=schedule).program  # noqa: B018
        assert line(test_mistakes_are_told_of_what_was_written, "# a device") in [w.line for w in caught.value.where]


def test_warpgroups_of_a_block_may_synchronize_in_the_grid():
    """As in the tensor-parallel GEMM of the white paper, which does not order blocks."""
    program = load(NUMBERED[8]).tp_gemm(2, 256, 256, 64)
    changed, schedule = overlapped(program)
    assert schedule.moves[0].overlapped
    rng = torch.Generator().manual_seed(0)
    shapes = (256, 32), (32, 256)
    args = [
        [*(torch.randn(s, generator=rng).bfloat16() for s in shapes), torch.full((256, 256), torch.nan)]
        for _ in range(2)
    ]
    check_same(program, changed, args, seeds=(None, 1))
