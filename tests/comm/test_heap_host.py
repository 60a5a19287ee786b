# SPDX-License-Identifier: MIT
"""The whole heap on shared memory of the CPU: ranks as threads with real sessions, and ranks as processes."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests import warm
from tilescale.comm import SymmetricHeap, Team, heap_of
from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import descriptors, open_heaps, provider
from tilescale.comm.heap.group import HeapGroup
from tilescale.errors import (
    ArgumentError,
    HeapExhaustedError,
    NotSymmetricError,
    RankMismatchError,
    ShapeError,
    UnsupportedError,
    UsageError,
)

ALONE = Team(ranks=(0,), rank=0)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_stays_open(request: pytest.FixtureRequest):
    if "run_job" in request.fixturenames:
        warm.python()  # which keeps pipes to its server
    before = len(os.listdir("/proc/self/fd"))
    gc.freeze()  # collections look at what the test makes alone
    yield
    gc.collect()
    open_heaps._end(open_heaps._open)
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "descriptors leak"


def on_ranks(run_ranks, size: int, work: Callable[[SymmetricHeap], Any], **options: Any) -> list[Any]:
    """Result or error of `work` on every rank, each with its own view of one heap."""

    def be(team: Team) -> Any:
        return work(SymmetricHeap(team, "cpu", **options))

    return run_ranks(size, be)


def good(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def test_systems_without_memory_files_have_temporary_ones(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")

    def work(heap: SymmetricHeap) -> list[float]:
        mine = heap.from_tensor(torch.full((4,), heap.team.rank + 1.0))
        heap.team.barrier()
        found = heap.peers(mine)[:, 0].tolist()
        heap.team.barrier()
        return found

    assert good(on_ranks(run_ranks, 2, work)) == [[1.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("of layout torch.sparse_coo", lambda: torch.ones(8).to_sparse()),
        ("of layout torch.sparse_csr", lambda: torch.ones(2, 8).to_sparse_csr()),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        ("quantized", lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        ("without data", lambda: torch.ones(3, device="meta")),
    ],
)
@pytest.mark.filterwarnings("ignore")  # PyTorch's, of layouts that it may change
def test_tensors_that_no_memory_holds_as_they_are(kind: str, make: Callable[[], torch.Tensor]) -> None:
    with SymmetricHeap(ALONE, "cpu") as heap, pytest.raises(ArgumentError, match=f"tensor is {kind}"):
        heap.from_tensor(make())


def test_systems_whose_processes_share_no_memory_say_so(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    outcomes = on_ranks(run_ranks, 2, lambda heap: None)
    assert all(isinstance(outcome, UnsupportedError) and "need Linux" in str(outcome) for outcome in outcomes)
    with SymmetricHeap(ALONE, "cpu") as heap:
        assert heap.zeros(4).tolist() == [0.0] * 4


def test_systems_without_a_boot_number_tell_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert socket.gethostname() in provider._host()


def test_every_rank_reaches_all_others(run_ranks) -> None:
    def work(heap: SymmetricHeap) -> bool:
        rank, team = heap.team.rank, heap.team
        x = heap.from_tensor(torch.full((4, 6), float(rank)))
        everywhere = heap.peers(x)
        for peer in range(team.size):
            assert (everywhere[heap.addresses.slot(peer)] == peer).all()
        team.barrier()
        part = heap.peers(x[1:3, ::2])  # a view of it, on all ranks
        part[heap.addresses.slot((rank + 1) % team.size)].fill_(10.0 + rank)
        team.barrier()
        assert (x[1:3, ::2] == 10.0 + (rank - 1) % team.size).all() and (x[0] == rank).all()
        assert x.is_contiguous() and everywhere.stride() == (heap.addresses.stride // 4, 6, 1)
        return heap.offset(x[1, 2:]) == heap.offset(x) + 8 * 4

    assert good(on_ranks(run_ranks, 3, work)) == [True] * 3


def test_growth_keeps_what_is_there(run_ranks) -> None:
    def work(heap: SymmetricHeap) -> list[int]:
        first = heap.from_tensor(torch.full((1000,), heap.team.rank))
        mapped = heap.usage().mapped
        large = heap.from_tensor(torch.arange(5 * MIB, dtype=torch.float32) + heap.team.rank)  # beyond the first chunk
        more = heap.usage().mapped
        assert more > mapped and heap.peers(large)[1][-1] == 5 * MIB - 1 + 1
        assert (heap.peers(first)[0] == 0).all()
        return [mapped, more, heap.offset(large)]

    outcomes = good(on_ranks(run_ranks, 2, work))
    assert outcomes[0] == outcomes[1]


@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 3))
def test_release_in_any_order_on_every_rank(run_ranks, seed: int, ranks: int) -> None:
    def work(heap: SymmetricHeap) -> list[int]:
        sizes, order = random.Random(seed), random.Random(seed + 1 + heap.team.rank)
        live: dict[int, torch.Tensor] = {}
        offsets = []
        for number in range(25):
            make = (heap.empty, heap.zeros)[number % 2]
            x = make((sizes.randrange(2000),), torch.int32)
            assert number % 2 == 0 or (x == 0).all()
            x.fill_(number * 16 + heap.team.rank)
            offsets.append(heap.offset(x))
            live[number] = x[len(x) // 2 :]  # a view keeps all of it
            for old in order.sample(sorted(live), k=min(len(live), order.randrange(3))):
                assert (live[old] == old * 16 + heap.team.rank).all(), "overwritten while this rank still has it"
                del live[old]
            del x
        live.clear()
        gc.collect()
        heap.team.barrier()
        heap.empty(1)
        usage = heap.usage()
        assert usage.used == 512 and usage.pending == 512, "the last one, which is gone as well"
        heap.close()
        return offsets

    outcomes = good(on_ranks(run_ranks, ranks, work))
    assert all(offsets == outcomes[0] for offsets in outcomes)


def test_memory_is_reused_only_when_all_have_released_it(run_ranks) -> None:
    def work(heap: SymmetricHeap) -> list[int]:
        a = heap.empty(100)
        offsets = [heap.offset(a)]
        kept = a if heap.team.rank == 1 else None
        del a
        b = heap.empty(100)
        offsets.append(heap.offset(b))
        assert heap.usage().pending == (512 if heap.team.rank == 0 else 0)
        del kept
        c = heap.empty(100)
        return [*offsets, heap.offset(c)]

    assert good(on_ranks(run_ranks, 2, work)) == [[0, 512, 0]] * 2


def test_ranks_meet_once_for_memory_that_is_mapped(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, str]] = []
    all_gather = HeapGroup.all_gather

    def noted(group: HeapGroup, call: CollectiveCall, value: Any) -> list[Any]:
        met.append((group.rank, call.op))
        return all_gather(group, call, value)

    def work(heap: SymmetricHeap) -> int:
        heap.empty(1)
        heap.team.barrier()
        monkeypatch.setattr(HeapGroup, "all_gather", noted)
        heap.team.barrier()
        kept = heap.empty(4), heap.zeros(4), heap.from_tensor(torch.ones(4))
        assert kept[1].tolist() == [0.0] * 4 and kept[2].tolist() == [1.0] * 4
        return len([op for rank, op in met if rank == heap.team.rank])

    assert good(on_ranks(run_ranks, 2, work)) == [3, 3]


def test_memory_that_was_filled_in_vain_stays_free(run_ranks) -> None:
    """Ranks fill it before they meet."""

    def work(heap: SymmetricHeap) -> list[int]:
        rank, kept = heap.team.rank, heap.from_tensor(torch.full((100,), 7.0))
        with pytest.raises(RankMismatchError):
            heap.zeros(8 + rank)
        with pytest.raises(RankMismatchError if rank == 0 else ArgumentError):
            heap.from_tensor(torch.ones(8) if rank == 0 else torch.ones(8).to_sparse())
        with pytest.raises(RankMismatchError):
            heap.zeros((8, 16 * MIB)[rank])  # more than is mapped
        assert (kept == 7).all() and heap.usage().used == 512
        return [heap.offset(heap.zeros(8)), heap.offset(heap.empty(8))]

    assert good(on_ranks(run_ranks, 2, work)) == [[512, 512]] * 2


def test_a_thread_allocates_while_another_one_does(run_ranks) -> None:
    """It does not get the memory that is being filled."""
    errors: list[BaseException] = []

    def work(heap: SymmetricHeap) -> list[float]:
        def other() -> None:
            try:
                heap.zeros(100)
            except UsageError as error:
                errors.append(error)

        def meanwhile(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return tensor.fill_(value[0])

        class Slow(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.Tensor.copy_:
                    with torch._C.DisableTorchFunctionSubclass():
                        return meanwhile(*args)
                return super().__torch_function__(func, types, args, kwargs or {})

        made = heap.from_tensor(torch.full((100,), 3.0).as_subclass(Slow))
        return made[:2].tolist()

    assert good(on_ranks(run_ranks, 2, work)) == [[3.0, 3.0]] * 2
    assert len(errors) == 2 and all("another thread" in str(error) for error in errors)


def test_a_full_heap_collects_cycles_before_it_gives_up() -> None:
    heap = SymmetricHeap(ALONE, "cpu", capacity=4 * MIB)
    gc.disable()
    try:
        cycle: list[Any] = [heap.empty(2 * MIB, torch.int8)]
        cycle.append(cycle)
        del cycle
        assert heap.zeros(3 * MIB, torch.int8).sum() == 0
    finally:
        gc.enable()


def test_out_of_memory_says_how_much_and_what_to_do(run_ranks) -> None:
    def work(heap: SymmetricHeap) -> str:
        kept = heap.empty(2 * MIB, torch.int8)
        with pytest.raises(HeapExhaustedError) as caught:
            heap.empty((3, MIB), torch.int8)
        heap.empty(2 * MIB, torch.int8)  # later allocations still fit
        assert kept.numel() == 2 * MIB
        return str(caught.value)

    text = good(on_ranks(run_ranks, 2, work, capacity=4 * MIB))[0]
    assert "3 MiB" in text and "2 MiB" in text and "TILESCALE_HEAP_BYTES=5MiB" in text and "test_heap_host.py" in text


def test_the_smallest_capacity_counts(run_ranks) -> None:
    def be(team: Team) -> int:
        return SymmetricHeap(team, "cpu", capacity=(team.rank + 1) * MIB).usage().capacity

    assert good(run_ranks(2, be)) == [MIB, MIB]


@pytest.mark.parametrize(
    ("asks", "found"),
    [
        (lambda heap, rank: heap.empty((4, 8 + rank)), ["(4, 8) of torch.float32", "(4, 9) of torch.float32"]),
        (lambda heap, rank: heap.empty(8, (torch.float32, torch.int32)[rank]), ["torch.float32", "torch.int32"]),
        (lambda heap, rank: heap.empty(8) if rank else heap.zeros(8), ["empty()", "zeros()"]),
        (lambda heap, rank: heap.empty(8) if rank else heap.team.barrier(), ["empty()", "barrier()"]),
    ],
)
def test_ranks_that_differ(run_ranks, asks, found: list[str]) -> None:
    def work(heap: SymmetricHeap) -> None:
        asks(heap, heap.team.rank)

    for outcome in on_ranks(run_ranks, 2, work):
        assert isinstance(outcome, RankMismatchError)
        assert all(text in str(outcome) for text in found)
        assert len(outcome.where) >= 2 and all(place.file == __file__ for place in outcome.where)


def test_after_a_mismatch_the_heap_still_works(run_ranks) -> None:
    def work(heap: SymmetricHeap) -> int:
        with pytest.raises(RankMismatchError):
            heap.empty(8 + heap.team.rank)
        return heap.offset(heap.empty(8))

    assert good(on_ranks(run_ranks, 2, work)) == [0, 0]


def test_tensors_that_are_not_symmetric() -> None:
    with SymmetricHeap(ALONE, "cpu") as heap, SymmetricHeap(ALONE, "cpu") as other:
        a, b = heap.zeros(4), other.zeros(4)
        assert heap.is_symmetric(a) and heap.is_symmetric(a[2:].view(torch.int32)) and not heap.is_symmetric(b)
        assert heap_of(a, a[1:]) is heap and heap_of(b) is other
        with pytest.raises(NotSymmetricError, match=r"lies in SymmetricHeap\(host"):
            heap.peers(b)
        with pytest.raises(NotSymmetricError, match="same heap"):
            heap_of(a, b)
        for foreign in (torch.zeros(4), a + 1, a.to_sparse(), torch.zeros(4, device="meta")):
            with pytest.raises(NotSymmetricError, match="tilescale.from_tensor"):
                heap.peers(foreign)
        with pytest.raises(NotSymmetricError):
            heap_of()
        del a, b


def test_they_are_ordinary_tensors() -> None:
    heap = SymmetricHeap(ALONE, "cpu")
    scalar, nothing = heap.zeros(()), heap.empty((0, 4))
    assert scalar.item() == 0 and nothing.shape == (0, 4) and heap.offset(nothing) != heap.offset(scalar)
    assert heap.peers(nothing).shape == (1, 0, 4) and heap.peers(scalar).shape == (1,)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16):
        x = heap.empty((2, 3), dtype)
        assert x.dtype == dtype and x.is_contiguous() and heap.peers(x.t()).shape == (1, 3, 2)
    weight = torch.nn.Parameter(heap.from_tensor(torch.ones(3, 3)))
    loss = (torch.eye(3) @ weight).sum()
    loss.backward()
    assert heap.is_symmetric(weight) and weight.grad.sum() == 9
    saved = (torch.ones(3, requires_grad=True) * heap.from_tensor(torch.arange(3.0))).sum()  # held by autograd alone
    gc.collect()
    heap.zeros(100)
    saved.backward()
    assert heap.from_tensor(torch.ones(2, requires_grad=True)).requires_grad is False
    del scalar, nothing, x, weight, loss, saved
    heap.zeros(1)
    assert heap.usage().used == 512


def test_views_over_all_ranks_keep_the_memory() -> None:
    heap = SymmetricHeap(ALONE, "cpu")
    everywhere = heap.peers(heap.from_tensor(torch.arange(4)))
    gc.collect()
    heap.zeros(4)
    assert everywhere.tolist() == [[0, 1, 2, 3]]
    del everywhere
    assert heap.offset(heap.empty(4)) == 0


def test_release_on_another_thread() -> None:
    heap = SymmetricHeap(ALONE, "cpu")
    box = [heap.empty(10)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert heap.usage().pending == 512 and heap.offset(heap.empty(10)) == 0


def test_closing() -> None:
    heap = SymmetricHeap(ALONE, "cpu")
    x = heap.empty(4)
    with pytest.raises(UsageError, match="1 tensors of the heap are still in use"):
        heap.close()
    del x
    heap.close()
    heap.close()
    assert "closed" in repr(heap) and not heap.is_open
    with pytest.raises(UsageError, match="closed"):
        heap.empty(4)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="no heap provider 'magic' for cpu devices") as caught:
        SymmetricHeap(ALONE, "cpu", provider="magic")
    assert "there is: host" in str(caught.value)
    with pytest.raises(UsageError, match="no heap provider 'cuda_vmm' for cpu"):
        SymmetricHeap(ALONE, "cpu", provider="cuda_vmm")
    with pytest.raises(UsageError, match="0 bytes"):
        SymmetricHeap(ALONE, "cpu", capacity=0)
    with pytest.raises(ShapeError, match=r"\(2, -1\)"):
        SymmetricHeap(ALONE, "cpu").empty((2, -1))


def test_processes_share_memory_and_leave_nothing_behind(run_job, tmp_path) -> None:
    done = run_job("tilescale run", 3, "heap.py", "share", TMPDIR=str(tmp_path))
    assert done.code == 0, done.output
    assert done.output.count("heap works") == 3
    assert sorted(re.findall(r"read at exit (\d)", done.output)) == ["0", "1", "2"]
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_ends_the_others(run_job, tmp_path) -> None:
    done = run_job("tilescale run", 3, "heap.py", "kill", TMPDIR=str(tmp_path))
    assert done.code != 0
    assert "RankFailedError" in done.output and "rank 1" in done.output
    assert not list(tmp_path.iterdir())


def test_no_descriptors_for_a_mailbox_is_said_by_all_ranks(run_ranks, monkeypatch) -> None:
    """The rank without memory reports it before the others wait for its memory."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def work(heap: SymmetricHeap) -> None:
        heap.zeros(1)
        heap.team.barrier()
        monkeypatch.setattr(descriptors, "Mailbox", refuse)
        heap.zeros(32 * MIB)

    for error in on_ranks(run_ranks, 2, work, capacity=512 * MIB):
        assert isinstance(error, HeapExhaustedError) and "Too many open files" in error.message, error
