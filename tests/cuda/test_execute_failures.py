# SPDX-License-Identifier: MIT
"""Failures as hosts read them from devices' reports, and messages of ranks before a first call."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.cuda.support import program
from tests.overlap.support import H200
from tilescale.backends.cuda.running import agreement, nccl
from tilescale.backends.cuda.running import wait_guard as running_guard
from tilescale.backends.cuda.running.agreement import on_all, once_per_node
from tilescale.backends.cuda.running.barrier_kernel import LastBarrier, purpose, site_of, standings
from tilescale.backends.cuda.running.diagnosis import ReportContext, error_for
from tilescale.backends.cuda.running.stream_order import IdleWait, noted_failure, wait_idle
from tilescale.backends.cuda.running.timeouts import HEAD, ROW, WaitFailure, WaitReport, decode
from tilescale.backends.cuda.running.wait_guard import WaitGuard
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.comm.agreement import Facts, agree
from tilescale.comm.failure_log import RankFailure
from tilescale.errors import (
    CollectiveNotReachedError,
    Location,
    OutOfBoundsError,
    RankFailedError,
    RankMismatchError,
    WaitTimeoutError,
)
from tilescale.ops import whole_tensors
from tilescale.program.builder import ProgramBuilder

SITES = [
    WaitSite("T.wait(F >=)", Location("program.py", 12), "F", ">="),
    WaitSite("T.barrier of level 'device'", Location("program.py", 14)),
    WaitSite("the barrier at its entry", Location("program.py", 8)),
    WaitSite("the barrier at its exit", Location("program.py", 8)),
    WaitSite("T.copy(after=F >=)", Location("program.py", 16), "F", ">=", queued=True),
]
ENTRY, EXIT = 2, 3


def scene(*standing: LastBarrier, rank: int = 0, elsewhere: tuple = ()) -> ReportContext:
    return ReportContext("gemm", rank, SITES, 3.0, standing, elsewhere)


def at(count: int, site: int = ENTRY) -> LastBarrier:
    return LastBarrier(count, purpose(site, 77) & 0xFFFF_FFFF)


def report(
    kind: WaitFailure, rank: int = 0, site: int = 0, index: int = 5, expected: int = 2, seen: int = 1
) -> WaitReport:
    return WaitReport(rank, kind, site, (3, 0, 1), index, expected, seen)


# -- words -------------------------------------------------------------------------------------------------------------


def test_complete_rows_become_reports():
    words = [0] * (HEAD + 3 * ROW)
    words[HEAD + ROW : HEAD + 2 * ROW] = [2, 0, 7, 11 | 5 << 31 | 3 << 47, 4, 9, -8, 0]
    words[HEAD + 2 * ROW] = 1  # being written
    assert decode(words) == [WaitReport(1, WaitFailure.TIMEOUT, 7, (11, 5, 3), 4, 9, -8)]


def test_ranks_of_another_node_have_their_own_numbers():
    seen = ReportContext("gemm", 1, SITES, 3.0, [at(2), at(2)], first=4)
    error = error_for([report(WaitFailure.ABSENT, rank=1, site=1, index=0)], seen)
    assert "gemm on rank 5" in str(error) and "rank 4 did not arrive in time" in str(error)
    assert "rank 4 is in the call too" in str(error)


@pytest.mark.parametrize("block", [(0x7FFF_FFFF, 65535, 65535), (0, 0, 0), (1, 0, 2)])
def test_every_block_of_a_grid_has_coordinates(block: tuple[int, int, int]):
    words = [0] * HEAD + [2, 0, 0, block[0] | block[1] << 31 | block[2] << 47, 0, 0, 0, 0]
    assert decode(words)[0].block == block


def test_a_purpose_holds_the_place_and_fits_a_word():
    for site in (0, 3, 511, 512, 1023):
        word = purpose(site, 0xFFFF_FFFF_FFFF)
        assert -(1 << 31) <= word < 1 << 31
        assert site_of(word & 0xFFFF_FFFF, 1024) == site
    assert purpose(1, 5) != purpose(1, 6) and site_of(purpose(9, 0), 4) is None


def test_standings_of_words_that_have_wrapped():
    word = (0x8000_0005 << 32 | 7) - (1 << 64)  # as a signed 64-bit number
    (standing,) = standings([word])
    assert standing == LastBarrier(0x8000_0005, 7)


def test_counts_wrap():
    assert LastBarrier(0xFFFF_FFFF, 0).behind(LastBarrier(1, 0)) == 2
    assert LastBarrier(1, 0).behind(LastBarrier(0xFFFF_FFFF, 0)) == -2


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_flag_that_does_not_come():
    error = error_for([report(WaitFailure.TIMEOUT)], scene(at(5), at(6, EXIT), at(3), at(0)))
    assert type(error) is WaitTimeoutError
    assert error.message.startswith(
        "gemm on rank 0, block (3, 0, 1): waited 3 s for F, element 5, >= 2; it is 1. The others: rank 1 has ended"
    )
    assert "rank 2 has not arrived so far; it was last at the barrier at its entry" in error.message
    assert "rank 3 has not arrived so far, nor to an earlier one" in error.message
    assert error.where == (Location("program.py", 12, "rank 0 waits here"),)


def test_a_copy_queue_that_waits_in_vain_is_no_block():
    error = error_for([report(WaitFailure.TIMEOUT, site=4)], scene(at(5), at(5)))
    assert error.message.startswith("gemm on rank 0, copy queue: waited 6 s for F, element 5, >= 2; it is 1.")


def test_a_program_without_barriers_knows_nothing_of_the_others():
    error = error_for([report(WaitFailure.ABSENT, site=1, index=1)], scene(LastBarrier(0, 0), LastBarrier(0, 0)))
    assert type(error) is WaitTimeoutError and error.message.endswith(
        "T.barrier of level 'device': rank 1 did not arrive in time. The others: unknown, as there is no barrier of "
        "all ranks around this program"
    )


def test_another_ranks_report_names_that_rank():
    error = error_for([report(WaitFailure.TIMEOUT, rank=1)], scene(at(6, EXIT), at(5)))
    assert "gemm on rank 1" in error.message and "so rank 0 stopped too" in error.message


def test_the_own_report_counts_first():
    both = [report(WaitFailure.TIMEOUT, rank=0, index=1), report(WaitFailure.TIMEOUT, rank=1, index=2)]
    assert "element 2" in error_for(both, scene(at(5), at(5), rank=1)).message


def test_a_wait_explains_why_a_rank_does_not_come():
    both = [report(WaitFailure.ABSENT, rank=0, site=EXIT, index=1), report(WaitFailure.TIMEOUT, rank=1)]
    error = error_for(both, scene(at(6, EXIT), at(5)))
    assert "gemm on rank 1, block" in error.message and "for F, element 5" in error.message


def test_a_rank_that_does_not_come():
    error = error_for([report(WaitFailure.ABSENT, site=ENTRY, index=1)], scene(at(5), at(4, EXIT)))
    assert type(error) is WaitTimeoutError and "rank 1 did not arrive in time" in error.message
    assert "it was last at the barrier at its exit" in error.message


def test_a_rank_that_waits_in_another_program():
    absent = [report(WaitFailure.ABSENT, site=ENTRY, index=1)]
    error = error_for(absent, scene(at(5), at(4, EXIT), elsewhere=((1, "softmax"),)))
    assert type(error) is RankMismatchError and "rank 0 waits in 'gemm', rank 1 waits in 'softmax'" in error.message
    # A rank that is in this call has only gone on after it was stopped.
    error = error_for(absent, scene(at(5), at(5), elsewhere=((1, "softmax"),)))
    assert type(error) is WaitTimeoutError


def test_ranks_with_other_tensors_and_at_other_places():
    same_place = report(WaitFailure.DIFFERENT, site=ENTRY, index=1, seen=purpose(ENTRY, 78))
    error = error_for([same_place], scene(at(5), at(5)))
    assert type(error) is RankMismatchError and "different tensors" in error.message
    other_place = report(WaitFailure.DIFFERENT, site=1, index=1, seen=purpose(EXIT, 0))
    assert "rank 1 at the barrier at its exit" in error_for([other_place], scene(at(5), at(5))).message


def guard_of(program: str, ranks: tuple[int, ...], *counts: int) -> WaitGuard:
    """This rank is number 2 of the job."""
    guard = WaitGuard.__new__(WaitGuard)
    guard._program, guard.sites, guard._limit_ns = program, SITES, 10**9
    guard._near = guard._group = SimpleNamespace(rank=ranks.index(2), ranks=ranks)
    guard.records = SimpleNamespace(read_concurrently=lambda tensor: tensor.tolist())
    guard.ranks = SimpleNamespace(words=torch.tensor([count << 32 for count in counts]))
    return guard


def test_a_barrier_waits_longer_than_what_keeps_ranks_from_it():
    """A rank that waits in a kernel fails first, with the reason."""
    guard = guard_of("program", (0, 1, 2), 1, 1, 1)
    guard.ranks = SimpleNamespace(barrier=lambda site, call, limit_ns, records: limit_ns)
    assert guard.barrier(ENTRY) == 3 * guard.limit_ns and guard.barrier(ENTRY, patience=1) == guard.limit_ns


def test_programs_of_other_ranks_are_told_in_the_numbers_of_this_one(monkeypatch: pytest.MonkeyPatch):
    """Each counts the ranks of its own team."""
    whole = guard_of("whole", (0, 1, 2, 3), 5, 4, 5, 4)
    pair = guard_of("pair", (2, 3), 7, 8)
    apart = guard_of("apart", (0, 2), 3, 3)
    monkeypatch.setattr(running_guard, "_guards", [whole, pair, apart])
    assert whole._scene().elsewhere == [(3, "pair")]
    assert pair._scene().elsewhere == [] and apart._scene().elsewhere == []
    absent = [report(WaitFailure.ABSENT, rank=2, site=ENTRY, index=3)]
    assert "rank 2 waits in 'whole', rank 3 waits in 'pair'" in error_for(absent, whole._scene()).message


def test_an_index_outside_of_the_flags():
    error = error_for([report(WaitFailure.OUTSIDE, index=-1, expected=8)], scene(at(1), at(1)))
    assert type(error) is OutOfBoundsError and "element -1 of 8" in error.message
    assert error.where == (Location("program.py", 12, "the flag's index"),)


@pytest.mark.parametrize(("index", "text"), [(0, "sends 9 rows, src has 8"), (1, "gets 9 rows, dst has 8")])
def test_rows_that_do_not_fit(index: int, text: str):
    error = error_for([report(WaitFailure.ROWS, index=index, seen=9, expected=8)], scene(at(1), at(1)))
    assert type(error) is OutOfBoundsError and text in error.message


def test_waits_stopped_by_the_host_are_no_mystery():
    assert "stopped before they ended" in error_for([], scene(at(1), at(1))).message


# -- agreement ---------------------------------------------------------------------------------------------------------


class Barrier:
    """Ranks that are threads: an all_gather of each call's values."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size, timeout=10)
        self.values: list[Any] = [None] * size

    def rank(self, number: int) -> Any:
        barrier = self

        class Group:
            def all_gather(self, call: Any, value: Any) -> list[Any]:
                barrier.values[number] = value
                barrier.barrier.wait()
                result = list(barrier.values)
                barrier.barrier.wait()
                return result

        return Group()


def on_ranks(size: int, run: Any) -> list[Any]:
    """Result or error of `run(group, rank)` on each rank."""
    barrier, results = Barrier(size), [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = run(barrier.rank(rank), rank)
        except Exception as error:  # noqa: BLE001 - it is the result
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    [t.start() for t in threads]
    [t.join(20) for t in threads]
    return results


def facts(**changed: Any) -> Facts:
    same = {"program": "gemm", "fingerprint": "a", "machine": ("h200", "x"), "options": "no options"}
    return Facts(**{**same, "calibration": "what is shipped", **changed})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"program": "softmax"}, "rank 0 calls 'gemm', rank 2 calls 'softmax'"),
        ({"fingerprint": "b"}, "constants or statements: `A = 0` on rank 0, `A = 2` on rank 2"),
        ({"machine": ("b200", "y")}, "for 'h200' on rank 0, for 'b200' on rank 2"),
        ({"options": "target='x'"}, "with no options on rank 0, with target='x' on rank 2"),
        # The schedules that they chose may differ, too, but that is not what has to be mended.
        ({"calibration": "another", "fingerprint": "b"}, "of 'h200': rank 0 by what is shipped, rank 2 by another"),
    ],
)
def test_ranks_that_build_different_programs(other: dict[str, Any], text: str):
    def one(group: Any, rank: int) -> None:
        agree(group, facts(**(other if rank == 2 else {})), lambda: f"f\n  A = {rank}")

    for error in on_ranks(3, one):
        assert type(error) is RankMismatchError and text in error.message and len(error.where) == 2


def test_programs_of_builders_are_compared_by_their_names_and_the_source(monkeypatch: pytest.MonkeyPatch):
    built = [ProgramBuilder(whole_tensors.sum_program, (2, dtype)) for dtype in ("bfloat16", "float32", "bfloat16")]
    one, other, same = (agreement.facts(program(each.build()), H200, {}).fingerprint for each in built)
    assert one == same != other
    monkeypatch.setattr(agreement, "source_digest", lambda: "another version")
    assert agreement.facts(program(built[0].build()), H200, {}).fingerprint != one


def test_options_of_a_program_are_facts_in_the_order_of_their_names():
    @T.prim_func
    def filled(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            T.clear(X)

    told = [agreement.facts(program(filled), H200, given).options for given in ({}, {"wait_s": 3, "target": "x"})]
    assert told == ["no options", "target='x', wait_s=3"]


def test_ranks_that_build_the_same_program():
    assert on_ranks(3, lambda group, rank: agree(group, facts(), lambda: "f")) == [None] * 3


def test_the_first_rank_compiles_before_the_others():
    order: list[int] = []
    results = on_ranks(3, lambda group, rank: once_per_node(group, rank == 0, lambda: order.append(rank) or rank))
    assert results == [0, 1, 2] and order[0] == 0


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_compiler_is_an_error_on_all_ranks(failing: int):
    def make(rank: int) -> int:
        if rank == failing:
            raise CollectiveNotReachedError("nvcc says no")
        return rank

    results = on_ranks(3, lambda group, rank: once_per_node(group, rank == 0, lambda: make(rank)))
    for rank, error in enumerate(results):
        assert type(error) is CollectiveNotReachedError
        assert rank == failing or f"raised on rank {failing}" in error.__notes__


def test_a_check_that_fails_somewhere_fails_everywhere():
    results = on_ranks(2, lambda group, rank: on_all(group, lambda: 1 // rank))
    assert [type(error) for error in results] == [ZeroDivisionError] * 2


# -- waiting for the device --------------------------------------------------------------------------------------------


class Device:
    """A device that is busy until its waits are stopped, its collectives aborted, or a time has passed."""

    def __init__(self, seconds: float = 10.0, needs: str = "stop"):
        self.done, self.seconds, self.needs, self.calls = threading.Event(), seconds, needs, []

    def wait(self) -> None:
        self.done.wait(self.seconds)

    def end(self, how: str) -> None:
        self.calls.append(how)
        if how == self.needs:
            self.done.set()

    def idle(self, failure: RankFailure | None = None, stopped: bool = False, grace_s: float = 0.2) -> bool:
        return wait_idle(
            IdleWait(self.wait),
            failure=lambda: noted_failure(lambda: failure),
            stopped=lambda: stopped,
            stop=lambda: self.end("stop"),
            abort=lambda: self.end("abort"),
            grace_s=grace_s,
        )


def test_an_idle_device_ends_the_wait():
    device = Device(0.1)
    assert device.idle() and device.calls == []


def test_a_death_ends_the_wait_at_once():
    device, begin = Device(), time.monotonic()
    with pytest.raises(RankFailedError, match="rank 3 disappeared"):
        device.idle(RankFailure(3, "rank 3 disappeared"))
    assert time.monotonic() - begin < 2 and device.calls == ["stop", "abort"]


def test_collectives_that_go_on_after_a_failed_wait_are_aborted():
    device = Device(needs="abort")
    assert device.idle(stopped=True) and device.calls == ["abort"]


class HangingGroups:
    """Process groups of which each ends only once all are asked to, as all keep the device busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: int):
        self.ended: list[int] = []
        self.all_asked = threading.Barrier(groups)
        monkeypatch.setattr(nccl, "_groups", {number: number for number in range(groups)})
        monkeypatch.setattr(nccl, "_aborted", False)
        monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", self.end)

    def end(self, group: int) -> None:
        self.all_asked.wait(20)
        self.ended.append(group)


def test_groups_of_nccl_are_aborted_side_by_side(monkeypatch: pytest.MonkeyPatch):
    groups = HangingGroups(monkeypatch, 3)
    nccl.abort()
    assert sorted(groups.ended) == [0, 1, 2] and nccl.aborted()
    nccl.abort()
    assert len(groups.ended) == 3, "they are gone"


def test_a_group_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    groups = HangingGroups(monkeypatch, 2)
    groups.all_asked = threading.Barrier(3)
    monkeypatch.setattr(nccl, "_ABORT_S", 0.05)
    nccl.abort()
    assert groups.ended == [] and nccl.aborted()
    groups.all_asked.abort()


@pytest.mark.parametrize("looks", [1, 3])
def test_an_error_of_nccl_is_that_of_a_rank_that_died(looks: int, monkeypatch: pytest.MonkeyPatch):
    """The job may detect the failure later than NCCL."""
    known = iter([*[None] * (looks - 1), RankFailure(1, "rank 1 disappeared")])
    guard = WaitGuard.__new__(WaitGuard)
    guard._world = SimpleNamespace(failure=lambda: next(known))
    error = torch.distributed.DistBackendError("remote process exited")
    assert nccl.is_failure(error) and not nccl.is_failure(RuntimeError())
    with pytest.raises(RankFailedError, match="rank 1 disappeared") as caught:
        guard.blame(error)
    assert caught.value.__cause__ is error
    monkeypatch.setattr(running_guard, "_NOTICE_S", 0.0)
    guard._world = SimpleNamespace(failure=lambda: None)
    guard.blame(error)  # all ranks are alive


def test_a_device_that_stays_busy_is_given_up():
    device, begin = Device(5.0, needs="nothing"), time.monotonic()
    assert not device.idle(stopped=True) and time.monotonic() - begin < 2


def test_what_a_kernel_raises_comes_through():
    def broken() -> None:
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        wait_idle(
            IdleWait(broken),
            failure=lambda: None,
            stopped=lambda: False,
            stop=lambda: None,
            abort=lambda: None,
            grace_s=1,
        )
