# SPDX-License-Identifier: MIT
"""Jobs in forked processes: all are done once, a failing or dying one stops nobody."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilescale.backends import processes, progress
from tilescale.runtime import ahead


def touch(path: Path) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_job_is_done_once(most: int, tmp_path: Path):
    processes.run_in_processes([partial(touch, tmp_path / str(n)) for n in range(7)], most)
    done = [(tmp_path / str(n)).read_text().split() for n in range(7)]
    assert all(len(pids) == 1 for pids in done)
    forked = {pid for pids in done for pid in pids} - {str(os.getpid())}
    assert bool(forked) == (most > 1)


@pytest.mark.parametrize("end", [lambda: 1 / 0, lambda: os._exit(3)], ids=["raises", "dies"])
def test_a_job_that_fails_leaves_the_others(end, tmp_path: Path):
    jobs = [end, *(partial(touch, tmp_path / str(n)) for n in range(4))]
    processes.run_in_processes(jobs, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_processes_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "STALL_S", 0.5)
    begin = time.monotonic()
    processes.run_in_processes([partial(time.sleep, 300), partial(time.sleep, 300)], 2)
    assert time.monotonic() - begin < 60


def test_what_takes_long_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TILESCALE_PROGRESS", "on")
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich a terminal
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    progress.settings.cache_clear()
    processes.run_in_processes([partial(time.sleep, 0.3)] * 2, 2, "compiling kernels")
    progress.settings.cache_clear()
    assert "compiling kernels" in capsys.readouterr().err


def test_programs_are_lowered_in_processes_before_any_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the three that are this rank's, the first one in this process."""
    world = SimpleNamespace(local_rank=1, local_size=2, device=torch.device("cuda"), barrier=lambda: None)
    monkeypatch.setattr(ahead, "init", lambda: world)
    monkeypatch.setattr(ahead, "processors", lambda: 4)
    prepared: list[int] = []

    def lower(number: int) -> None:
        (tmp_path / str(number)).write_text(str(os.getpid()))
        if number == 3:
            raise ValueError("whoever loads it hears of it")

    def kernel(number: int) -> SimpleNamespace:
        return SimpleNamespace(
            lower=partial(lower, number),
            compilations=lambda: [] if len(list(tmp_path.iterdir())) == 3 else pytest.fail("not lowered yet"),
            prepare=lambda: prepared.append(number),
        )

    ahead.compile_all([kernel(number) for number in range(6)])
    by = {int(path.name): int(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(by) == [1, 3, 5] and prepared == list(range(6))
    assert by[1] == os.getpid() and os.getpid() not in (by[3], by[5])
