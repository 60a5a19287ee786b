# SPDX-License-Identifier: MIT
"""The cost model leaves the best few, whose timings are interleaved; failures have a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tilescale.backends.cuda.running import nccl
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.tuning import places, search
from tilescale.tuning.places import TimeSource
from tilescale.tuning.progress import ProgressSteps
from tilescale.tuning.race import Runner
from tilescale.tuning.search import ConfigSearch

ESTIMATES = {1: 10.0, 2: 20.0, 3: 30.0, 4: None, 5: 50.0}
"""By the number of a configuration; the cost model has no value for the fourth."""
TIMES = {1: 12.0, 2: 7.0, 3: 9.0, 4: 8.0, 5: 1.0}


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def all_gather(self, obj: Any) -> list[Any]:
        return [obj]


@dataclass
class Script:
    """A timer that knows all times, and records its calls."""

    log: list[int] = field(default_factory=list)

    def barrier(self) -> None:
        pass

    def prepare(self, call: Callable[[], int]) -> Callable[[int], float]:
        def group(calls: int) -> float:
            self.log.append(call())
            return TIMES[self.log[-1]]

        return group


@dataclass(frozen=True)
class Scripted(TimeSource):
    """A place with that timer."""

    script: Script = field(default_factory=Script)

    def timer(self, mode: str) -> Script:
        return self.script


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Programs are the numbers of their configurations."""

    def estimate(number: int, machine: Machine, shapes: Any) -> float:
        if ESTIMATES[number] is None:
            raise UsageError("no idea")
        return ESTIMATES[number]

    monkeypatch.setattr(search, "simulated_us", estimate)
    return Scripted(Machine.load("h200-sxm-8"), Alone(), False, 1)


def number(config: dict[str, int]) -> int:
    if config["n"] == 0:
        raise ValueError("tiles of nothing")
    return config["n"]


def tuned(place: TimeSource, *numbers: int, **how: Any) -> Any:
    how.setdefault("build", lambda config: Runner(lambda: config["n"]))
    return ConfigSearch("program", [{"n": n} for n in numbers], number, rounds=3, **how).run(place, ProgressSteps())


def test_the_fastest_that_was_measured_wins(place: Scripted):
    found = tuned(place, 1, 2, 3, 4, 5)
    assert (found.config, found.us, found.simulated) == ({"n": 5}, 1.0, False)
    assert [trial.config["n"] for trial in found.trials] == [5, 2, 4, 3, 1]
    assert found.trials[1].estimated_us == 20 and found.trials[1].spread == (7, 7)


def test_the_cost_model_leaves_the_best_few(place: Scripted):
    found = tuned(place, 5, 3, 2, 1, top=2)
    assert found.config == {"n": 2} and {t.config["n"] for t in found.trials if t.us is None} == {3, 5}
    assert set(place.script.log) == {1, 2}
    assert all(trial.failed is None for trial in found.trials)


def test_estimates_far_from_the_least_are_left_out(place: Scripted):
    found = tuned(place, 1, 2, 3, 5, within=2.5)
    assert {t.config["n"] for t in found.trials if t.us is not None} == {1, 2}


def test_nobody_is_timed_in_a_row(place: Scripted):
    tuned(place, 1, 2, 3, warmup=0)
    timed = place.script.log
    assert timed == [1, 2, 3, 2, 3, 1, 3, 1, 2]


def test_whoever_fails_says_why_and_the_others_go_on(place: Scripted):
    def build(config: dict[str, int]) -> Runner:
        if config["n"] == 1:
            raise RuntimeError("nvcc is not amused")
        check = (lambda seed: (_ for _ in ()).throw(ValueError("wrong: 7 of 9"))) if config["n"] == 5 else None
        return Runner(lambda: config["n"], check)

    found = tuned(place, 0, 1, 2, 5, build=build)
    failed = {trial.config["n"]: trial.failed for trial in found.trials if trial.failed}
    assert found.config == {"n": 2}
    assert failed == {
        0: "ValueError: tiles of nothing",
        1: "RuntimeError: nvcc is not amused",
        5: "ValueError: wrong: 7 of 9",
    }


def test_if_nothing_works_all_reasons_are_told(place: Scripted):
    with pytest.raises(UsageError, match="(?s)no configuration of program works.*n=0: ValueError: tiles of nothing"):
        tuned(place, 0, 0)


def test_ranks_meet_by_the_store_of_their_job(monkeypatch: pytest.MonkeyPatch):
    """Not every launcher sets torch.distributed's rendezvous in the environment."""
    started: list[dict[str, Any]] = []
    world = SimpleNamespace(size=2, rank=1, ranks=(0, 1), device=torch.device("cuda", 1), store=dist.HashStore())
    monkeypatch.setattr(places, "init", lambda: world)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: started.append(how))
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: tuple(ranks))
    monkeypatch.setattr(nccl.atexit, "register", lambda leave: None)
    monkeypatch.setattr(nccl, "_groups", {})
    assert places.here(Machine.load("h200-sxm-8")).units == 2
    (how,) = started
    assert how["rank"] == 1 and how["world_size"] == 2 and how["store"] is not None and how["timeout"]
