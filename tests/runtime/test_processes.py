# SPDX-License-Identifier: MIT
"""Jobs in forked processes: all are done once, a failing or dying one does not stop the others."""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_ranks_share_out_what_is_lowered_before_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """Errors of lowering are raised where all ranks ask for the program."""
    log: list[str] = []
    world = SimpleNamespace(local_rank=1, local_size=2, barrier=lambda: log.append("barrier"))
    monkeypatch.setattr(ahead, "init", lambda: world)
    monkeypatch.setattr(ahead, "cores", lambda: 2)

    def lower(number: int) -> None:
        log.append(f"lower {number}")
        if number == 3:
            raise ValueError(f"kernel {number}")

    def kernel(number: int) -> SimpleNamespace:
        def asked() -> list[object]:
            log.append(f"ask for {number}")
            return []

        return SimpleNamespace(lower=partial(lower, number), compilations=asked, prepare=lambda: None)

    ahead.compile_all([kernel(number) for number in range(5)])
    assert log[:3] == ["lower 1", "lower 3", "barrier"]
    assert log[3:] == [*(f"ask for {number}" for number in range(5)), "barrier"]


def test_garbage_is_not_collected_meanwhile(monkeypatch: pytest.MonkeyPatch):
    """A collection goes through all objects of a model."""
    monkeypatch.setattr(ahead, "init", lambda: SimpleNamespace(local_rank=0, local_size=1, barrier=lambda: None))
    found: list[bool] = []
    kernel = SimpleNamespace(lower=lambda: None, compilations=list, prepare=lambda: found.append(gc.isenabled()))
    ahead.compile_all([kernel])
    assert found == [False] and gc.isenabled()


def test_kernels_of_a_rank_are_lowered_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each lowering leaves its program in the cache, in a process that this one does not wait for before the next."""
    world = SimpleNamespace(local_rank=0, local_size=1, barrier=lambda: None)
    monkeypatch.setattr(ahead, "init", lambda: world)
    monkeypatch.setattr(ahead, "cores", lambda: 2)

    def lower(number: int) -> None:
        (tmp_path / f"{number} {os.getpid()}").touch()
        while len(list(tmp_path.iterdir())) < 2:  # until the other one has begun
            time.sleep(0.01)

    kernels = [SimpleNamespace(lower=partial(lower, n), compilations=list, prepare=lambda: None) for n in range(2)]
    ahead.compile_all(kernels)
    numbers, processes = zip(*(path.name.split() for path in tmp_path.iterdir()), strict=True)
    assert sorted(numbers) == ["0", "1"]
    assert len({*processes, str(os.getpid())}) == 3
