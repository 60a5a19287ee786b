# SPDX-License-Identifier: MIT
"""Calls that differ in where their tensors lie: what is bound anew, and what is not."""

import gc
import weakref
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.cuda.fakes import Device
from tests.cuda.test_execute_calls import put
from tests.cuda.test_where_devices_synchronize import on_tensors, reduced
from tilescale.backends.cuda.running.memory import KEPT
from tilescale.backends.cuda.running.plans import LAUNCHED_BEFORE, SET_BEFORE


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two."""
    return Device(monkeypatch)


def test_a_call_with_tensors_elsewhere_takes_the_launches_of_the_call_before(device: Device, monkeypatch):
    own = device.program(put())
    x, y, other = (device.heap.zeros((64, 64), torch.float32) for _ in range(3))
    own([x, y])
    (first,) = device.log
    device.log.clear()
    with monkeypatch.context() as patch:
        patch.setattr(own, "_steps", None)  # nothing is bound: only the kernel takes X
        own([other, y])
    (second,) = device.log
    places = [[t.data_ptr() for t in entry if torch.is_tensor(t)] for entry in (first, second)]
    assert [other.data_ptr() if p == x.data_ptr() else p for p in places[0]] == places[1] != places[0]
    with pytest.raises(TypeError):
        monkeypatch.setattr(own, "_steps", None)
        own([x, other])  # peers reach Y


def test_calls_with_tensors_elsewhere_share_a_graph(device: Device):
    own = device.program(put())
    x, y, *others = (device.heap.zeros((64, 64), torch.float32) for _ in range(6))
    for given in (x, *others):
        own([given, y])
    launched = [entry for entry in device.log if entry != "replay"]
    assert device.names() == ["put_0"] * LAUNCHED_BEFORE + ["replay"] * 3 and len(device.graphs) == 1
    (place,) = (i for i, t in enumerate(launched[0][1:]) if torch.is_tensor(t) and t.data_ptr() == x.data_ptr())
    passed = [kernel[place].data_ptr() for (kernel,) in device.replayed]
    assert passed == [other.data_ptr() for other in others[LAUNCHED_BEFORE - 1 :]]
    for _ in range(SET_BEFORE + LAUNCHED_BEFORE):  # at one place
        own([others[0], y])
    assert len(device.graphs) == 1
    for _ in range(SET_BEFORE):  # set from one to the other, until one of both has its own
        own([others[1], y])
        own([others[0], y])
    assert len(device.graphs) == 2 and set(device.names()) == {"replay"}


def turned() -> Any:
    """Every block sends what it has in Y on, and adds X."""

    @T.prim_func
    def turned(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            tile, more = (T.alloc((16, 64), "float32", level="l0") for _ in range(2))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * 16, 0], tile)
                T.copy(Y[bx * 16, 0], more)
                for i, j in T.Parallel(16, 64):
                    tile[i, j] += more[i, j]
                T.barrier()
                T.copy(tile, Y[bx * 16, 0], dst=(rank + 1) % size)

    return turned


@pytest.mark.filterwarnings("ignore:.*not a symmetric tensor")
def test_a_symmetric_stand_in_stays_in_its_place(device: Device):
    own = device.program(turned())
    x, y, other = (torch.zeros(64, 64) for _ in range(3))
    own([x, y])
    own([other, y])
    kernels = [entry for entry in device.log if entry[0] == "turned_0"]
    places = [{t.data_ptr() for t in entry if torch.is_tensor(t)} for entry in kernels]
    assert y.data_ptr() not in places[0] | places[1], "peers reach Y: kernels take what stands for it"
    assert places[0] - {x.data_ptr()} == places[1] - {other.data_ptr()} and other.data_ptr() in places[1]


def passed_on() -> Any:
    """Rows go to the next device."""
    rows = T.dynamic("rows")

    @T.prim_func
    def passed_on(X: T.Tensor((rows, 64), "float32"), Y: T.Tensor((rows, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            tile = T.alloc((16, 64), "float32", level="l0")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * 16, 0], tile)
                T.copy(tile, Y[bx * 16, 0], dst=(rank + 1) % size)

    return passed_on


def shifted() -> Any:
    """The first rows go to the next device through memory of the program's own, which has room for all."""
    rows = T.dynamic("rows")

    @T.prim_func
    def shifted(X: T.Tensor((rows, 64), "float32"), Y: T.Tensor((rows, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            with T.Scale("device"):
                held = T.alloc((rows, 64), "float32", level="l2")
            tile = T.alloc((16, 64), "float32", level="l0")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * 16, 0], tile)
                T.copy(tile, held[bx * 16, 0], dst=(rank + 1) % size)
                T.barrier()
                T.copy(held[bx * 16, 0], tile)
                T.copy(tile, Y[bx * 16, 0])

    return shifted


def held(own: Any) -> list[torch.Tensor]:
    """The program's own memory."""
    return [t for t in own.memory._own_tensors() if t.dtype == torch.float32]


def test_sizes_that_alternate_need_no_new_memory_and_no_new_plans(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(shifted())
    given = {rows: [torch.zeros(rows, 64) for _ in range(2)] for rows in (64, 80, 96, 112)}
    for rows in given:
        own(given[rows])
    kernels = [entry for entry in device.log if entry[0] == "shifted_0"]
    monkeypatch.setattr(device.heap, "zeros", None)
    for rows in [*given, *reversed(given)]:
        assert own.again(given[rows])
        own([torch.zeros(rows, 64) for _ in range(2)])
    assert len(held(own)) == KEPT == len(given)
    # Each takes the memory of its own size.
    mine = {t.data_ptr(): t.shape[0] for t in held(own)}
    rows_of = [{mine[t.data_ptr()] for t in entry if torch.is_tensor(t) and t.data_ptr() in mine} for entry in kernels]
    assert rows_of == [{rows} for rows in given]


@pytest.mark.filterwarnings("ignore:.*not a symmetric tensor")
def test_stand_ins_of_sizes_that_alternate_are_kept(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(passed_on())
    for rows in (64, 80):
        own([torch.zeros(rows, 64) for _ in range(2)])
    monkeypatch.setattr(device.heap, "empty", None)
    for rows in (64, 80, 64):
        own([torch.zeros(rows, 64) for _ in range(2)])


def test_memory_that_a_captured_graph_uses_outlives_later_calls(device: Device):
    own = device.program(shifted())
    made: dict[int, weakref.ref] = {}

    def alive_after(rows: int) -> list[int]:
        own([torch.zeros(rows, 64) for _ in range(2)])
        made[rows] = weakref.ref(held(own)[-1])
        device.log.clear()
        gc.collect()
        return [n for n, tensor in made.items() if tensor() is not None]

    assert alive_after(64) == [64]
    assert [alive_after(rows) for rows in (80, 96, 112)][-1] == [64, 80, 96, 112]
    assert alive_after(128) == [80, 96, 112, 128], "the last few"
    device.capturing = True
    own([torch.zeros(96, 64) for _ in range(2)])  # not the newest
    device.capturing = False
    for rows in (144, 160, 176, 192):
        alive = alive_after(rows)
    assert alive == [80, 96, 112, 128, 144, 160, 176, 192], "the graph may be replayed"


def test_operations_of_the_host_are_bound_to_where_tensors_lie(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(on_tensors(reduced))
    given = [torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(8, dtype=torch.int32)]
    own(given)
    monkeypatch.setattr(own, "_steps", None)
    with pytest.raises(TypeError):
        own([torch.zeros(64, 64), *given[1:]])
