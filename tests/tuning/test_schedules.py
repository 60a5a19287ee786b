# SPDX-License-Identifier: MIT
"""Schedules chosen by measuring: the best few of the cost model, timed, and the fastest kept."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.overlap.support import H200
from tests.overlap.test_estimate import gather_then_multiply
from tilescale.comm import Team
from tilescale.errors import UsageError
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.tuning import places, schedules, search
from tilescale.tuning.database import Database
from tilescale.tuning.programs import product
from tilescale.tuning.schedules import candidates

CHUNK = re.compile(r"chunk=(\d+)")


def microseconds(func: Any, *_: Any) -> float:
    """A machine on which few large chunks are fast, for any cost model."""
    chunks = CHUNK.findall(func.script())
    return 1000.0 / int(chunks[0]) if chunks else 500.0


def test_the_fastest_of_the_best_few_is_taken_and_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(places, "simulated_us", microseconds)
    program = gather_then_multiply(4, 4096)
    estimated = tilescale.compile(program, machine=H200, schedule="overlap").moves.moves[0]
    assert not estimated.overlapped  # few tiles: by the estimate it does not pay
    kernel = tilescale.compile(program, machine=H200, schedule=tilescale.measured)
    ((_, kept),) = Database.of_user().all()
    tried = [chosen["chunk"] for trial in kept["trials"] for chosen in trial["config"].values() if chosen["overlapped"]]
    (move,) = kernel.moves.moves
    assert move.overlapped and move.chunk == max(tried) > min(tried)
    assert kept["us"] == min(trial["us"] for trial in kept["trials"]) == round(1000 / move.chunk, 2)
    said = f"fastest of {len(kept['trials'])} schedules, 500 us in order"
    assert str(kernel.moves).endswith(said) and "simulated: " in str(kernel.moves)

    monkeypatch.setattr(schedules, "_search", lambda *_: pytest.fail("measured again"))
    again = tilescale.compile(program, machine=H200, schedule=tilescale.measured)
    assert str(again.moves) == str(kernel.moves) and again.python == kernel.python


def test_a_program_without_choices_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schedules, "_search", lambda *_: pytest.fail("measured"))
    kernel = tilescale.compile(product(H200, 1, (256, 256, 256)), machine=H200, schedule=tilescale.measured)
    assert kernel.moves.moves == [] and kernel.moves.measured == ""


@pytest.mark.parametrize("tuned", [False, True])
def test_a_factory_takes_it_too(tuned: bool, monkeypatch: pytest.MonkeyPatch):
    """Also one whose tiles are tuned: each configuration has the schedule of the estimate."""
    seen: list[str] = []

    def noted(func: Any, *_: Any) -> float:
        seen.append(func.script())
        return microseconds(func)

    monkeypatch.setattr(places, "simulated_us", noted)
    monkeypatch.setattr(search, "simulated_us", noted)

    @tilescale.jit(machine=H200, schedule=tilescale.measured)
    def factory(n, rows=64):
        @T.prim_func
        def f(X: T.Tensor((n, 64), "float32"), Y: T.Tensor((n, 64), "float32")):
            with T.Kernel(device=2, block=n // rows, threads=128) as b:
                whole = T.alloc((n, 64), "float32", level="l2")
                with T.Scale("device"):
                    T.all_gather(T.view(X, layout=T.FullRow), whole)
                with T.Scale("block"):
                    x = T.alloc((rows, 64), "float32", level="l1")
                    T.copy(whole[b * rows, 0], x)
                    T.copy(x, Y[b * rows, 0])

        return f

    if tuned:
        factory = tilescale.autotune(configs={"rows": [32, 64]})(factory)
    kernel = factory(1 << 21)
    assert kernel.moves.moves[0].overlapped and kernel.moves.measured
    assert not tuned or all(CHUNK.search(text) for text in seen[:2]) and len(factory.result.trials) == 2


def test_schedules_of_a_team_are_not_measured():
    alone = Team(ranks=(0,), rank=0)
    with pytest.raises(UsageError, match="not on a team"):
        tilescale.compile(gather_then_multiply(4, 4096), machine=H200, team=alone, schedule=tilescale.measured)


def test_candidates_are_the_least_estimates_and_the_program_in_order():
    """Two collectives: the queue or tiles may send the first, the second never pays."""
    by_two = Move("allreduce", ("X", "X"), in_order_s=9.0)
    by_two.estimates = {("queue", 8): 5.0, ("queue", 16): 4.0, ("tiles", 8): 4.5}
    never = Move("all_gather", ("Y", "Z"), overlapped=False, in_order_s=1.0)
    never.estimates = {(None, 4): 50.0}
    found = candidates(Schedule([by_two, never]), most=6)
    firsts = [schedule.moves[0] for schedule, _ in found]
    assert [(move.carrier, move.chunk, move.adds, move.ordered) for move in firsts] == [
        ("queue", 16, None, True),
        ("queue", 16, "grid", True),
        ("queue", 16, None, False),
        ("tiles", 8, None, True),
        ("tiles", 8, None, False),
        (None, None, None, True),
    ]
    assert [seconds for _, seconds in found] == [5.0, 5.0, 5.0, 5.5, 5.5, 10.0]
    assert not any(schedule.moves[1].overlapped for schedule, _ in found)
    assert [move.overlapped for move in firsts] == [True] * 5 + [False]
