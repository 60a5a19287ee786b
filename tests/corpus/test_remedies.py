# SPDX-License-Identifier: MIT
"""Errors propose the line that was left out: the program with that line is correct again."""

from itertools import islice
from pathlib import Path

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.corpus.record import each
from tests.corpus.repair import candidates, repairs
from tests.emulator.checks.support import line_of
from tilescale.errors import DeadlockError, RaceError

pytestmark = pytest.mark.usefixtures("remedies")

ROUNDS, PLACES = 6, 2


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_waits_and_signals_that_are_left_out_are_said(step: int, tmp_path: Path):
    """In all programs at night, in each fourth one daily."""
    found = [repair for program in islice(candidates(), 0, None, step) for repair in repairs(program, tmp_path)]
    hinted = [repair for repair in found if repair.hinted]
    right = [repair for repair in hinted if repair.right]
    assert len(found) >= 80 // step
    assert len(hinted) >= 0.75 * len(found), "programs that only wait have no access that a signal could stand behind"
    assert len(right) >= 0.98 * len(hinted), [repair for repair in hinted if not repair.right]


def stream(left_out: str):
    """Rows through an inbox of two places, with credits; without one of its four waits and signals."""

    @T.prim_func
    def program(
        X: T.Tensor((ROUNDS, 64), "float32"),
        Y: T.Tensor((ROUNDS, 64), "float32"),
        inbox: T.Tensor((PLACES, 64), "float32"),
        arrived: T.Tensor((1,), "int32"),
        free: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((64,), "float32")
                with T.Scale("device") as (rank, _):
                    for r in T.serial(ROUNDS):
                        if rank == 0:
                            T.copy(X[r, 0], tile)
                            if left_out != "wait for a place":
                                T.wait(free[0], ">=", r - PLACES + 1)
                            T.copy(tile, inbox[r % PLACES, 0], dst=1)  # sent
                            if left_out != "signal of a row":
                                T.signal(arrived[0], dst=1)
                        if rank == 1:
                            if left_out != "wait for a row":
                                T.wait(arrived[0], ">=", r + 1)
                            T.copy(inbox[r % PLACES, 0], tile)  # received
                            if left_out != "signal of a place":
                                T.signal(free[0], dst=0)
                            T.copy(tile, Y[r, 0])

    return program, each(2, (ROUNDS, 64), (ROUNDS, 64), (PLACES, 64), 1, 1)


@pytest.mark.parametrize(
    ("left_out", "remedy"),
    [
        ("wait for a place", 'add T.wait(free[0], ">=", r - 1) before line {sent};'),
        ("wait for a row", 'add T.wait(arrived[0], ">=", r + 1) before line {received};'),
        ("signal of a place", "add T.signal(free[0], dst=0) after line {received};"),
        ("signal of a row", "add T.signal(arrived[0], dst=1) after line {sent};"),
    ],
)
def test_rounds_of_a_loop(left_out: str, remedy: str):
    program, given = stream(left_out)
    with pytest.raises((RaceError, DeadlockError)) as found:
        tilescale.emulate(program, given)
    lines = {name: line_of(name) for name in ("sent", "received")}
    assert found.value.hint.startswith(remedy.format(**lines))


def exchange():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y, dst=1 - rank, signal=F[0])
                T.wait(F[0], ">=", 1)
                T.copy(Y, X)

    return program, each(2, (8,), (8,), 1)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_flag_of_the_last_call(seed: int | None):
    program, given = exchange()
    tilescale.emulate(program, given)
    with pytest.raises(RaceError) as found:
        tilescale.emulate(program, given, schedule_seed=seed)
    assert found.value.hint.startswith(
        "F[0] was 1 already when the call began: clear it, or make flags by T.alloc_flags; with that"
    )
    for tensors in given:
        tensors[2].zero_()
    tilescale.emulate(program, given)


def test_the_search_leaves_the_tensors_alone():
    program, given = stream("wait for a row")
    flags = [tensors[3] for tensors in given]
    with pytest.raises(RaceError):
        tilescale.emulate(program, given)
    assert sum(int(flag) for flag in flags) <= 2, "the run that failed, and none of those after it"
    assert not torch.equal(given[0][0], given[1][1])
