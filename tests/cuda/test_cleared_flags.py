# SPDX-License-Identifier: MIT
"""Flags of `T.alloc_flags` are zero when a call begins: by launches, or by the kernel of the call before.

What kernels do about it runs here in threads of the host, several ranks in step with each other and out of it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.cuda import programs
from tests.cuda.fakes import Device
from tests.cuda.host_text import on_host
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running.steps import ProgramCall
from tilescale.backends.tilelang.lowering.call_barriers import CallBarriers

RANK_BYTES, REPORT = 4096, 3584
LONG_NS, SHORT_NS = 250 * 10**9, 10**7


class Job:
    """Ranks with the memory of one program, made of a text of the device functions."""

    def __init__(self, text: str, folder: Path):
        self._run = on_host(text, "host_calls.h", folder).run
        self._run.restype = ctypes.c_long

    def calls(self, memory: Any, blocks: int, calls: int, to_all: bool, absent: int = -1, limit: int = LONG_NS) -> int:
        """Errors found in a number of calls of each rank but one."""
        given = (ctypes.c_void_p(memory.data_ptr()), len(memory), blocks, calls, int(to_all), absent)
        return self._run(*given, ctypes.c_long(limit))


def headers() -> str:
    return "".join(map(header, ("memory.cuh", "sync.cuh", "rendezvous.cuh")))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """With the functions as they are."""
    return Job(headers(), tmp_path_factory.mktemp("calls"))


def memory_of(ranks: int) -> torch.Tensor:
    """The memory of all ranks, zeroed as a heap zeroes it."""
    return torch.zeros(ranks, RANK_BYTES, dtype=torch.uint8)


def failed(memory: torch.Tensor) -> list[bool]:
    """Ranks whose calls were stopped."""
    return memory[:, REPORT : REPORT + 8].view(torch.int64).ne(0).any(1).tolist()


@pytest.mark.parametrize("waits_for_all", [True, False], ids=["flags", "exit"])
@pytest.mark.parametrize("calls", [60, pytest.param(600, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("ranks", "blocks"), [(2, 1), (2, 3), (4, 2)])
def test_each_call_finds_flags_of_zero(job: Job, ranks: int, blocks: int, calls: int, waits_for_all: bool):
    memory = memory_of(ranks)
    assert job.calls(memory, blocks, calls, waits_for_all) == 0
    assert failed(memory) == [False] * ranks


@pytest.mark.parametrize("waits_for_all", [True, False], ids=["flags", "exit"])
def test_after_a_call_that_was_stopped_all_begins_at_zero(job: Job, waits_for_all: bool):
    memory = memory_of(3)
    job.calls(memory, 2, 5, waits_for_all, absent=1, limit=SHORT_NS)
    assert failed(memory) == [True] * 3, "rank 1 did not come to the last call"
    memory.zero_()  # kernel.reset()
    assert job.calls(memory, 2, 50, waits_for_all) == 0
    assert failed(memory) == [False] * 3


def test_flags_that_are_not_cleared_are_found(tmp_path: Path):
    text = headers()
    kept = text.replace("*const_cast<volatile V*>(flags + i) = 0;", ";")
    assert kept != text
    memory = memory_of(2)
    assert Job(kept, tmp_path).calls(memory, 2, 3, to_all=True, limit=SHORT_NS) > 0


# -- what a call launches ----------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two, whose kernels leave flags at 5."""
    return Device(monkeypatch)


def _flags_seen(device: Device, own: Any, rows: int) -> list[int]:
    """Flags seen by each of three calls."""
    given, seen = [device.heap.zeros((rows, 64), torch.float32) for _ in range(2)], []

    def launched(name: str, *args: Any) -> None:
        flags = next(a for a in args if torch.is_tensor(a) and a.dtype == torch.int64 and a.shape[-1] == 2)
        seen.append(int(flags.max()))
        flags.fill_(5)

    device.on_launch, device.capturing = launched, True  # kernels are launched one by one
    for _ in range(3):
        own(given)
    return seen


@pytest.mark.parametrize("waits", [True, False])
def test_a_small_kernel_with_a_rendezvous_clears_its_flags(device: Device, waits: bool):
    own = device.program(programs.put_with_own_flags(waits))
    assert own._lowered.rendezvous == CallBarriers(True, not waits, inside=True, patience=3 if waits else 1)
    assert _flags_seen(device, own, rows=64) == [0, 5, 5], "nothing but the kernel touches them"
    (text,) = (grid.kernel.func.script() for grid in own._lowered.grids)
    last = text[text.rindex("tilescale::") :]
    assert last.startswith("tilescale::count" if waits else "tilescale::leave")
    assert "arrived" in last and "T.int64(8)" in last, "all of them"


def test_flags_of_a_larger_program_are_zeroed_before_devices_synchronize(device: Device):
    own = device.program(programs.put_with_own_flags(blocks=256))
    assert _flags_seen(device, own, rows=16 * 256) == [0, 0, 0]
    assert not own._lowered.rendezvous.inside


def test_one_launch_zeroes_all_flags_of_a_program(device: Device):
    """Flags of any types; names share no 128 bytes."""

    @T.prim_func
    def signals(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(device=2, block=300, threads=32) as bx:
            few, wide, many = T.alloc_flags((2, 3)), T.alloc_flags((5,), "int64"), T.alloc_flags((300,))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[0:1, :], Y[0:1, :], dst=(rank + 1) % size, signal=few[rank, 0])
                T.signal(wide[0], dst=(rank + 1) % size)
                T.signal(many[bx])
                T.wait(few[(rank + 1) % size, 0], ">=", 1)

    own = device.program(signals)
    own([device.heap.zeros((64, 64), torch.float32) for _ in range(2)])
    (made,) = own.memory._flags
    flags = [made.parts[name] for name in ("few", "wide", "many")]
    assert [tuple(tensor.shape) for tensor in flags] == [(2, 3), (5,), (300,)]
    assert [tensor.dtype for tensor in flags] == [torch.int32, torch.int64, torch.int32]
    places = [f.data_ptr() - flags[0].data_ptr() for f in flags]
    assert places == [0, 128, 256]
    for tensor in flags:
        tensor.fill_(7)
    (zero,) = own.memory.zeroed(ProgramCall([]))
    zero()
    assert not any(tensor.any() for tensor in flags)


def test_launches_that_name_their_flags_alike_have_their_own(device: Device):
    """Of different shapes, by one macro too."""

    @T.macro
    def told(blocks):
        with T.Kernel(device=2, block=blocks, threads=32) as bx:
            arrived = T.alloc_flags((blocks,))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.signal(arrived[bx], dst=(rank + 1) % size)
                T.wait(arrived[bx], ">=", 1)

    @T.prim_func
    def signals(X: T.Tensor((1,), "int32")):
        told(2)
        told(300)

    own = device.program(signals)
    own([torch.zeros(1, dtype=torch.int32)])
    (made,) = own.memory._flags
    assert [tuple(tensor.shape) for tensor in made.parts.values()] == [(2,), (300,)]
