# SPDX-License-Identifier: MIT
"""Exchanges of ranks while a program is built: how many they are, and what ends them on all ranks.

Ranks are threads with real sessions and heaps on memory of the CPU. Compilers and devices do nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.support import lowered
from tests.cuda.test_execute_calls import put
from tests.cuda.test_execute_queue import Queue
from tests.cuda.test_lowered_cache import OPERATORS
from tilescale.backends.cuda.running import (
    barrier_kernel,
    execute,
    grids,
    queued,
    queued_exchange,
    stream_order,
    timeouts,
    wait_guard,
)
from tilescale.backends.cuda.running.collectives import exchanges
from tilescale.backends.tilelang.lowering.program import LoweredProgram
from tilescale.backends.tilelang.text import STRIDE
from tilescale.comm import SymmetricHeap, Team, World
from tilescale.comm.session import Session
from tilescale.errors import LaunchError, RankFailedError, RankMismatchError, UnsupportedError


class Job:
    """Two ranks that build programs.

    Attributes:
        met: names of the exchanges of rank 0, in order.
        fits, loads, resident: called with a rank's number where it checks its GPU, loads a kernel, checks that it is
            resident.
    """

    def __init__(self, patch: pytest.MonkeyPatch, run_ranks: Callable[..., list[Any]]):
        self.met: list[str] = []
        self.fits = self.loads = self.resident = lambda rank: None
        self._here, self._run_ranks = threading.local(), run_ranks
        here = self._here
        rendezvous = Session.rendezvous

        def noted(session: Session, ranks: tuple[int, ...], call: Any) -> Any:
            if session.rank == 0:
                self.met.append(call.op)
            return rendezvous(session, ranks, call)

        patch.setattr(Session, "rendezvous", noted)
        patch.setattr(World, "device", torch.device("cpu"))
        patch.setattr(execute, "init", lambda: here.world)
        patch.setattr(execute, "heap_for", lambda team: here.heap)
        patch.setattr(execute, "check_gpu", lambda machine, device: self.fits(here.world.rank))
        patch.setattr(execute, "check_residency", lambda own, grid, kernel: self.resident(here.world.rank))
        patch.setattr(execute.nccl, "joins", lambda team, world: True)
        patch.setattr(execute.stock, "keeps_kernels", lambda: True)
        patch.setattr(execute, "compile_missing", lambda jobs, number, ranks: None)
        patch.setattr(execute.stock.KernelCompilation, "run", lambda made: self.loads(here.world.rank))
        patch.setattr(execute.stock.TextCompilation, "run", lambda made: made.text.encode())
        patch.setattr(execute.DeviceProgram, "_code_target", "cuda")
        guard: Any = vars(execute.DeviceProgram)["guard"]
        patch.setattr(guard, "lock", contextlib.nullcontext(), raising=False)  # all threads share it in Python 3.11
        patch.setattr(exchanges, "functions", lambda code, kernel, device: {True: "", False: ""})
        for module in (queued, queued_exchange):
            patch.setattr(module, "copy_queue", lambda device: Queue([]))
        for module in (barrier_kernel, grids.stock):
            patch.setattr(module, "entry", lambda kernel: kernel)
        patch.setattr(wait_guard, "_watch", lambda guard: None)
        patch.setattr(timeouts, "past_waits", lambda device: None)
        patch.setattr(timeouts, "_unused", iter(lambda: torch.zeros(1, dtype=torch.int64), None))
        patch.setattr(timeouts, "_stop_word", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace())
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        stream_order.stream_order.cache_clear()
        barrier_kernel.barrier_function(2, STRIDE)  # traced once: two threads would have two of it

    def run(self, work: Callable[[int], Any], timeout_s: float = 20.0) -> list[Any]:
        """Result or error of `work` on each rank; `met` has its exchanges."""

        def be(team: Team) -> Any:
            fields = {"ranks": team.ranks, "rank": team.rank, "_session": team._session}
            self._here.world = World(**fields, launcher="", node_of=(0, 0))
            self._here.heap = heap = SymmetricHeap(team, "cpu", capacity=STRIDE)
            try:
                heap.zeros(1)  # maps memory
                if team.rank == 0:
                    self.met.clear()
                return work(team.rank)
            finally:
                heap.end()

        return self._run_ranks(2, be, timeout_s)

    def builds(self, *programs: LoweredProgram) -> list[Any]:
        """Errors of ranks that build programs: all the same one, or each its own."""
        return self.run(lambda rank: execute.DeviceProgram(programs[rank % len(programs)], {}).build() and None)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, run_ranks: Callable[..., list[Any]]) -> Job:
    return Job(monkeypatch, run_ranks)


@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "all_reduce"])
def test_ranks_meet_at_most_four_times_for_a_program(job: Job, name: str):
    """Three times where its kernels are compiled with those of other programs."""
    made = lowered(OPERATORS[name](), devices=2).lowered
    assert job.builds(made) == [None, None]
    assert job.met == ["kernel", "kernel.check", "kernel.check", "zeros"]

    def in_a_warm_up(rank: int) -> None:
        own = execute.DeviceProgram(made, {})
        own.compilations()
        own.build()

    assert job.run(in_a_warm_up) == [None, None]
    assert job.met == ["kernel", "kernel.check", "zeros"]


def test_ranks_that_build_different_programs_end(job: Job):
    programs = [lowered(OPERATORS[name](), devices=2).lowered for name in ("all_reduce", "all_to_all")]
    for error in job.builds(*programs):
        assert type(error) is RankMismatchError and "different programs" in error.message
    job.fits = lambda rank: 1 // (1 - rank)
    for error in job.builds(*programs):
        assert type(error) is RankMismatchError, "which may be the cause"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("step", ["fits", "loads", "resident"])
def test_an_error_of_one_rank_is_raised_on_both(job: Job, step: str, failing: int):
    def fail(rank: int) -> None:
        if rank == failing:
            raise UnsupportedError("not here") if step == "fits" else LaunchError("not here")

    setattr(job, step, fail)
    errors = job.builds(lowered(put(), devices=2).lowered)
    for rank, error in enumerate(errors):
        assert type(error) is (UnsupportedError if step == "fits" else LaunchError) and error.message == "not here"
        assert rank == failing or f"raised on rank {failing}" in error.__notes__
    setattr(job, step, lambda rank: None)
    assert job.builds(lowered(put(), devices=2).lowered) == [None, None]


def test_a_rank_that_does_not_build_ends_the_other(job: Job):
    made = lowered(put(), devices=2).lowered
    outcomes = job.run(lambda rank: None if rank else execute.DeviceProgram(made, {}).build(), timeout_s=2.0)
    assert outcomes[1] is None and type(outcomes[0]) is RankFailedError
