# SPDX-License-Identifier: MIT
"""Calls with tensors at different addresses: the parts that are bound again, and the others."""

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
from tilescale.backends.cuda.running.plans import LAUNCHED_BEFORE


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two."""
    return Device(monkeypatch)


def nothing_is_bound(monkeypatch: pytest.MonkeyPatch, own: Any) -> None:
    monkeypatch.setattr(own, "_bind", lambda values: pytest.fail("a call is bound"))


def test_a_graph_serves_calls_with_tensors_elsewhere(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(put())
    y = device.heap.zeros((64, 64), torch.float32)
    others = torch.zeros(LAUNCHED_BEFORE + 6, 64, 64).unbind()
    for given in others[: LAUNCHED_BEFORE + 1]:
        own([given, y])
    assert device.names() == ["put_0"] * LAUNCHED_BEFORE + ["replay"]
    assert device.instantiated == 1 and len(device.graphs) == 2, "one of the first call shows what moves"
    nothing_is_bound(monkeypatch, own)
    for given in others[LAUNCHED_BEFORE + 1 :]:
        assert own.again((given, y))
    assert device.instantiated == 1 and len(device.graphs) == 2 and set(device.names()) == {"replay"}
    ((_, *first),), passed = device.graphs[0], [kernel for (kernel,) in device.replayed]
    where = others[LAUNCHED_BEFORE].data_ptr()
    (place,) = (i for i, t in enumerate(first) if torch.is_tensor(t) and t.data_ptr() == where)
    assert [kernel[place] for kernel in passed] == [other.data_ptr() for other in others[LAUNCHED_BEFORE:]]
    assert len({tuple(kernel[:place] + kernel[place + 1 :]) for kernel in passed}) == 1, "all else stays"


def test_peers_memory_is_not_moved_by_a_graph(device: Device):
    own = device.program(put())
    x, *symmetric = (device.heap.zeros((64, 64), torch.float32) for _ in range(4))
    own([x, symmetric[0]])
    assert not own.again((x, symmetric[1])), "peers reach Y"


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
    device.capturing = True  # kernels are launched one by one
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
    """Send the first rows to the next device through a workspace of the program, which has space for all."""
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


def test_operations_of_the_host_move_with_their_tensors(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(on_tensors(reduced))
    kept, y, flags = torch.zeros(8, 64, 64).unbind(), torch.zeros(64, 64), torch.zeros(8, dtype=torch.int32)
    for number, given in enumerate(kept):
        if number == LAUNCHED_BEFORE + 2:
            nothing_is_bound(monkeypatch, own)
        own([given, y, flags])
    structures = [f"{max(map(max, passed)):x}" for passed in device.replayed]  # of the exchange, as one number
    places = [{x.data_ptr() for x in kept if f"{x.data_ptr():x}" in structure} for structure in structures]
    assert device.instantiated == 1 and places == [{x.data_ptr()} for x in kept[LAUNCHED_BEFORE:]]


@T.macro
def gathered_columns(X, Y, flags, rank, size):
    T.all_gather(X[:, 0:32], Y, dim=1, impl="direct")


@T.macro
def reduced_columns(X, Y, flags, rank, size):
    T.allreduce(Y[:, 0:32], impl="two_shot")


@pytest.mark.parametrize("statements", [gathered_columns, reduced_columns])
@pytest.mark.parametrize("at_once", [False, True])
def test_workspaces_of_launches_are_made_before_a_capture(device: Device, statements: Any, at_once: bool):
    """Copies of columns that collectives move are made by launches; a first call may be a graph already."""
    own = device.program(on_tensors(statements))
    own.queue_waits = at_once
    y, flags = torch.zeros(64, 64), torch.zeros(8, dtype=torch.int32)
    for x in torch.zeros(6, 64, 64):
        own([x, y, flags])
    assert device.instantiated and device.replayed
