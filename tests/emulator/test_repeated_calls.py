# SPDX-License-Identifier: MIT
"""Calls of one kernel share their closures: each starts from nothing else that an earlier call has left."""

from typing import Any

import pytest
import torch

import tilescale.language as T
from tilescale.backends.emulator.compiled import Compiled, Kept
from tilescale.backends.emulator.emulate import emulate_program
from tilescale.backends.emulator.report import Report
from tilescale.errors import DeadlockError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse

UNITS, MACHINE = 2, Machine.load("h200-sxm-8")


def exchanged() -> Any:
    """Y: the neighbour's X, doubled, where its sender signals; `waits`: for how many signals."""
    n = T.dynamic("n")

    @T.prim_func
    def f(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32"), waits: T.int32):
        with T.Kernel(device=UNITS, block=T.ceildiv(n, 32), threads=32) as b:
            arrived = T.alloc_flags((1,))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                t = T.alloc((32,), "float32", level="l1")
                T.copy(X[b * 32], t)
                for i in T.Parallel(32):
                    t[i] *= 2
                T.copy(t, Y[b * 32], dst=(rank + 1) % size, signal=arrived[0])
                T.wait(arrived[0], ">=", waits)

    return f


def call(program: Any, n: int, kept: Kept | None, waits: int | None = None) -> Report:
    x = torch.randn(UNITS, n)
    y = torch.full((UNITS, n), torch.nan)
    count = -(-n // 32) if waits is None else waits
    report = emulate_program(program, MACHINE, [[*tensors, count] for tensors in zip(x, y, strict=True)], kept=kept)
    assert torch.equal(y, 2 * x.roll(1, 0))
    return report


def test_each_call_has_values_times_and_counts_of_its_own(monkeypatch: pytest.MonkeyPatch):
    program, kept, made = analyse(exchanged(), MACHINE), {}, []
    init = Compiled.__init__
    monkeypatch.setattr(Compiled, "__init__", lambda self, *args: (made.append(1), init(self, *args))[1])
    reports = [(n, call(program, n, kept)) for n in (64, 40, 7, 64, 320)]
    assert len(made) == 1
    for n, report in reports:
        alone = call(program, n, None)
        assert report.time_us == alone.time_us and report.activity == alone.activity
        assert str(report.timeline) == str(alone.timeline)


def test_a_call_that_fails_leaves_nothing_to_the_next():
    program, kept = analyse(exchanged(), MACHINE), {}
    before = call(program, 64, kept)
    with pytest.raises(DeadlockError):
        call(program, 64, kept, waits=3)
    assert call(program, 64, kept).time_us == before.time_us
