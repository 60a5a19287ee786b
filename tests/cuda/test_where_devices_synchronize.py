# SPDX-License-Identifier: MIT
"""Synchronization of all devices when a program is called: in separate kernels, or in a grid of the program."""

from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.cuda import programs
from tests.cuda.fakes import Device
from tests.cuda.support import lowered
from tests.cuda.test_execute_calls import put
from tilescale.backends.cuda.running.plans import LAUNCHED_BEFORE
from tilescale.backends.tilelang.lowering.call_barriers import CallBarriers
from tilescale.hda import Machine
from tilescale.passes.persistent.rewrite import persistent

NEVER, BEGIN = CallBarriers(False, False), CallBarriers(True, False)
BOTH, INSIDE = CallBarriers(True, True), CallBarriers(True, True, inside=True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two."""
    return Device(monkeypatch)


def doubled_and_put(tells: bool = False, shares_flags: bool = False) -> Any:
    """A grid that fills the device, without others; then a small one whose blocks put a row each."""

    @T.prim_func
    def doubled(X: T.Tensor((4096, 64), "float32"), Y: T.Tensor((4, 64), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            arrived = T.alloc_flags((4,))
            with T.Scale("device") as (rank, size):
                for i, j in T.Parallel(4096, 64):
                    X[i, j] = X[i, j] * 2.0
                if shares_flags:
                    for i in T.Parallel(4):
                        arrived[i] = 0
            with T.Scale("device"), T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx, 0:64], Y[bx, 0:64], dst=(rank + 1) % size, signal=arrived[bx])
                T.wait(arrived[bx], ">=", 1)
            if tells:
                with T.Scale("device"):
                    T.signal(F[0])

    return doubled


def on_tensors(statements: Any) -> Any:
    """Traces the macro `statements(X, Y, flags, rank, size)` in a device phase."""

    @T.prim_func
    def f(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32"), flags: T.Tensor((8,), "int32")):
        with T.Kernel(device=2):
            with T.Scale("device") as (rank, size):
                statements(X, Y, flags, rank, size)

    return f


@T.macro
def reduced(X, Y, flags, rank, size):
    T.allreduce(X, impl="one_shot")


@T.macro
def reduced_by_nccl(X, Y, flags, rank, size):
    T.allreduce(X, impl="nccl")


@T.macro
def local(X, Y, flags, rank, size):
    T.copy(X, Y)


@T.macro
def copied(X, Y, flags, rank, size):
    T.copy(X, Y, dst=(rank + 1) % size, impl="copy_engine")


@T.macro
def copied_then_barrier(X, Y, flags, rank, size):
    T.copy(X, Y, dst=(rank + 1) % size, impl="copy_engine")
    T.barrier()


@T.macro
def met_and_copied(X, Y, flags, rank, size):
    T.barrier()
    T.copy(X, Y, dst=(rank + 1) % size, impl="copy_engine")


@T.macro
def copied_then_perhaps_barrier(X, Y, flags, rank, size):
    T.copy(X, Y, dst=(rank + 1) % size, impl="copy_engine")
    for _ in T.serial(flags[0]):
        T.barrier()


@T.macro
def told(X, Y, flags, rank, size):
    T.copy(X, Y, dst=(rank + 1) % size, signal=flags[0], impl="copy_engine")
    T.wait(flags[0], ">=", 1)


@T.macro
def waits_alone(X, Y, flags, rank, size):
    T.wait(flags[0], ">=", 1)


@pytest.mark.parametrize(
    ("func", "wanted"),
    [
        (on_tensors(local), NEVER),
        (on_tensors(reduced), NEVER),
        (on_tensors(reduced_by_nccl), BEGIN),
        (on_tensors(copied), BOTH),
        (on_tensors(copied_then_barrier), BEGIN),
        (on_tensors(met_and_copied), BOTH),
        (on_tensors(copied_then_perhaps_barrier), BOTH),
        (on_tensors(told), BOTH),
        (on_tensors(waits_alone), CallBarriers(True, False, inside=True, patience=3)),
        (programs.sum_of_tiles(), NEVER),
        (programs.barrier(), NEVER),
        (programs.put_with_signal(), INSIDE),
        (put(), INSIDE),
        (put(ends_with_barrier=True), CallBarriers(True, False, inside=True)),
        (put(rows=16 * 256, blocks=256), BOTH),
        (programs.steps(), BOTH),
        (doubled_and_put(), CallBarriers(True, False, inside=True, patience=3)),
        (doubled_and_put(shares_flags=True), BOTH),
        (doubled_and_put(tells=True), CallBarriers(True, False, patience=3)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_which_rendezvous_a_program_needs(func: Any, wanted: CallBarriers):
    assert lowered(func).lowered.rendezvous == wanted


@pytest.mark.parametrize(("tells", "patience"), [(True, 3), (False, 1)])
def test_an_entry_behind_waits_of_the_call_before_is_more_patient(
    device: Device, monkeypatch: pytest.MonkeyPatch, tells: bool, patience: int
):
    """Without an exit a rank that hangs in a wait of the program has to fail first, with the cause."""
    found: list[int] = []

    def barrier(site: int, call: int = 0, patience: int = 3) -> Any:
        return lambda: found.append(patience)

    monkeypatch.setattr(device.guard, "barrier", barrier)
    own = device.program(doubled_and_put(tells=tells, shares_flags=not tells))
    shapes = ((4096, 64), torch.float32), ((4, 64), torch.float32), ((1,), torch.int32)
    own([device.heap.zeros(*shape) for shape in shapes])
    assert found[0] == patience


def test_a_pipelined_grid_keeps_its_producer():
    @T.prim_func
    def product(A: T.Tensor((64, 512), "float16"), Y: T.Tensor((64, 512), "float16")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            tile = T.alloc((16, 64), "float16", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(A[bx * 16, k * 64], tile)
                    T.copy(tile, Y[bx * 16, k * 64], dst=(rank + 1) % size)

    assert lowered(product).lowered.rendezvous == BOTH


def test_tasks_with_pipelined_loops_synchronize_in_their_launch():
    @T.prim_func
    def summed(
        X: T.Tensor((64, 512), "float16"), Y: T.Tensor((64, 512), "float16"), Z: T.Tensor((64, 64), "float32")
    ):  # fmt: skip
        with T.Kernel(device=2, block=4, threads=128) as bx:
            for i, j in T.Parallel(16, 512):
                Y[bx * 16 + i, j] = X[bx * 16 + i, j] * 2
        with T.Kernel(device=2, block=4, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((16, 64), "float16", level="l1")
                total = T.alloc((16, 64), "float32", level="l0")
                sums = T.alloc((16, 64), "float32", level="l1")
                T.clear(total)
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(Y[bx * 16, k * 64], tile)
                    for i, j in T.Parallel(16, 64):
                        total[i, j] += tile[i, j]
                T.copy(total, sums)
                with T.Scale("device"):
                    T.allreduce(sums)
                T.copy(sums, Z[bx * 16, 0])

    func, _ = persistent(summed, Machine.load("h200-sxm-8"))
    assert lowered(func).lowered.rendezvous.inside
    assert not lowered(summed).lowered.rendezvous.inside


def test_one_device_synchronizes_with_nobody():
    @T.prim_func
    def alone(F: T.Tensor((1,), "int32")):
        with T.Kernel(block=2, threads=64):
            with T.Scale("block"):
                T.signal(F[0])
                T.wait(F[0], ">=", 1)

    assert lowered(alone).lowered.rendezvous == NEVER


def test_barriers_stand_around_a_call(device: Device):
    own = device.program(put(rows=16 * 256, blocks=256))
    given = [[device.heap.zeros((16 * 256, 64), torch.float32) for _ in range(2)] for _ in range(2)]
    own(given[0])
    (_, entry, digest), kernel, (_, exit, nothing) = device.log
    assert own.sites[entry].what == "the barrier at its entry" and own.sites[exit].what == "the barrier at its exit"
    assert kernel[0] == "put_0" and digest and not nothing
    device.log.clear()
    own(given[1])
    assert device.log[0][2] != digest, "other tensors"


def test_devices_synchronize_in_the_one_grid_that_reaches_others(device: Device):
    own = device.program(doubled_and_put())
    first, second = (grid.kernel.func.script() for grid in own._lowered.grids)
    assert "tilescale::" not in first
    assert [second.count(f"tilescale::{name}") for name in ("come", "enter", "count")] == [1, 1, 1]
    own([device.heap.zeros(s, torch.float32) for s in [(4096, 64), (4, 64)]] + [torch.zeros(1, dtype=torch.int32)])
    assert len(device.names()) == 2, "nothing else is launched, also no flags are zeroed"


def test_a_sum_of_a_tensor_needs_no_rendezvous(device: Device):
    own = device.program(on_tensors(reduced))
    given = [torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(8, dtype=torch.int32)]
    for _ in range(LAUNCHED_BEFORE + 1):
        own(given)
    assert device.names() == ["reduce_words_aligned"] * LAUNCHED_BEFORE + ["replay"]
