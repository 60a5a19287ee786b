# SPDX-License-Identifier: MIT
"""Calls of programs: plans, graphs, copies in and out, waits of devices. The device is a fake with a log."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.fakes import Device
from tilescale import backends
from tilescale.alarm import raise_after
from tilescale.backends.cuda.running import stream_order
from tilescale.backends.cuda.running.plans import KEPT, LAUNCHED_BEFORE
from tilescale.errors import UnsupportedError, WaitTimeoutError
from tilescale.hda import Machine
from tilescale.ops.workspace import Workspace


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Rank 0 of two."""
    return Device(monkeypatch)


def put(rows: int = 64, blocks: int = 4, ends_with_barrier: bool = False) -> Any:
    """Every block puts its tile into the next device's memory."""

    @T.prim_func
    def put(X: T.Tensor((rows, 64), "float32"), Y: T.Tensor((rows, 64), "float32")):
        with T.Kernel(device=2, block=blocks, threads=128) as bx:
            tile = T.alloc((16, 64), "float32", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * 16, 0], tile)
                T.copy(tile, Y[bx * 16, 0], dst=(rank + 1) % size)
                if ends_with_barrier:
                    T.barrier()

    return put


def fetched() -> Any:
    """Every block takes a tile from the next device's memory."""

    @T.prim_func
    def fetched(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            tile = T.alloc((16, 64), "float32", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * 16, 0], tile, src=(rank + 1) % size)
                T.copy(tile, Y[bx * 16, 0])

    return fetched


def scaled() -> Any:
    """Loops of the host around a grid: three launches, then one for each step that `n` asks for."""

    @T.prim_func
    def scaled(X: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            with T.Scale("device"):
                for step in T.serial(3 + n):
                    with T.Scale("block"):
                        for i, j in T.Parallel(16, 64):
                            X[bx * 16 + i, j] = X[bx * 16 + i, j] * step

    return scaled


def halved() -> Any:
    """A loop that looks at the device."""

    @T.prim_func
    def halved(X: T.Tensor((1,), "float32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("device"):
                while X[0] > 1.0:
                    with T.Scale("block"):
                        X[0] = X[0] / 2

    return halved


def counted() -> Any:
    """A loop and a branch by what a grid before them has stored."""

    @T.prim_func
    def counted(N: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("device"):
                with T.Scale("block"):
                    N[0] = N[0] + 1
                for step in T.serial(N[0]):
                    with T.Scale("block"):
                        N[0] = N[0] * (step + 2)
                if N[0] > 2:
                    with T.Scale("block"):
                        N[0] = N[0] - 3

    return counted


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_call_is_bound_once_for_the_same_tensors(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(put())
    x, y = device.heap.zeros((64, 64), torch.float32), device.heap.zeros((64, 64), torch.float32)
    assert not own.again((x, y)) and device.names() == []
    device.capturing = True  # a graph of the caller's has kernels in it, not a graph
    own([x, y])
    first = list(device.log)
    assert device.names() == ["put_0"]
    monkeypatch.setattr(device.heap, "offset", None)  # no lookup is repeated
    assert own.again((x, y))
    assert [a if not torch.is_tensor(a) else a.data_ptr() for a in device.log[0]] == [
        a if not torch.is_tensor(a) else a.data_ptr() for a in first[0]
    ]


def test_a_plan_that_repeats_becomes_a_graph(device: Device):
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    for _ in range(LAUNCHED_BEFORE):
        own(given)
    assert device.names() == ["put_0"] * LAUNCHED_BEFORE and not device.graphs
    for _ in range(3):
        assert own.again(tuple(given))
    assert device.names() == ["replay"] * 3
    assert [[entry[0] for entry in graph] for graph in device.graphs] == [["put_0"]]
    device.capturing = True  # a graph of the caller's has kernels in it, not a graph
    assert own.again(tuple(given)) and device.names() == ["put_0"]


def test_kernels_are_loaded_before_one_of_them_runs_where_a_queue_waits_for_what_follows(device: Device):
    own = device.program(put())
    own.queue_waits = True
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(4)]
    own(given[:2])
    assert device.names() == ["replay"] and [[entry[0] for entry in graph] for graph in device.graphs] == [["put_0"]]
    device.log.clear()
    own(given[2:])  # of another form: the kernels are there
    assert device.names() == ["put_0"]


def test_loops_of_the_host_are_unrolled_with_their_steps(device: Device):
    own = device.program(scaled())
    x = torch.zeros(64, 64)
    device.capturing = True
    for n in (0, 2):
        own([x, n])
        steps = [entry[1] for entry in device.log]
        assert steps == list(range(3 + n)), "each launch has its own step"
        device.log.clear()
    assert own.again((x, 2)) and len(device.names()) == 5


def test_scalars_that_only_kernels_take_need_no_plan_of_their_own(device: Device):
    @T.prim_func
    def turns(F: T.Tensor((4,), "int32"), turn: T.int32):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.signal(F[bx], dst=(rank + 1) % size)
                T.wait(F[bx], ">=", turn)

    own = device.program(turns)
    flags = device.heap.zeros((4,), torch.int32)
    own([flags, 1])
    (place,) = (i for i, x in enumerate(device.log[0][1:]) if isinstance(x, int) and x == 1 and i)
    for turn in (2, 3, 7, 8):
        assert own.again((flags, turn))
    assert device.names() == ["turns_0"] * LAUNCHED_BEFORE + ["replay"] * 4, "a graph is passed other scalars"
    assert [kernel[place] for (kernel,) in device.replayed] == [2, 3, 7, 8] and device.instantiated == 1
    device.capturing = True
    assert own.again((flags, 9)) and device.log[0][1 + place] == 9


def test_what_looks_at_the_device_is_never_a_graph(device: Device, monkeypatch: pytest.MonkeyPatch):
    own = device.program(halved())
    looks = []
    monkeypatch.setattr(own, "synchronize", lambda: looks.append(len(device.log)))
    x = torch.tensor([4.0])

    device.on_launch = lambda name, *args: x.div_(2)
    for wanted in (2, 3, 3, 3):
        x.fill_(2.0**wanted)
        with raise_after(20.0, TimeoutError("the loop does not end")):
            if not own.again((x,)):
                own([x])
        assert device.names() == ["halved_0"] * wanted
    assert looks and not device.graphs
    device.capturing = True
    with pytest.raises(UnsupportedError, match="decides on values in device memory"):
        own([x])


def test_loops_and_branches_are_decided_when_the_stream_reaches_them(device: Device, monkeypatch: pytest.MonkeyPatch):
    own, n = device.program(counted()), torch.zeros(1, dtype=torch.int32)
    steps: list[str] = []
    queue = SimpleNamespace(flush=lambda: steps.append("flush"), batched=lambda launches: launches)
    monkeypatch.setattr(own, "queue", queue)
    monkeypatch.setattr(own, "synchronize", lambda: steps.append("synchronize"))
    change = {"counted_0": lambda: n.add_(1), "counted_1": lambda: n.mul_(2), "counted_2": lambda: n.sub_(3)}
    device.on_launch = lambda name, *args: change[name]()
    for start, rounds in ((0, 1), (1, 2), (-1, 0)):
        n.fill_(start)
        own([n])
        branch = ["counted_2"] if start == 1 else []
        assert device.names() == ["counted_0", *["counted_1"] * rounds, *branch]
    assert steps == ["flush", "synchronize"] * 6, "copies that wait for a flag are started before a read waits for them"


def test_plans_keep_no_tensor_alive_and_are_right_for_the_next_one_there(device: Device):
    own = device.program(scaled())
    memory = torch.zeros(64 * 64)
    x = memory.clone()
    gone = weakref.ref(x.untyped_storage())
    own([x.view(64, 64), 0])
    device.log.clear()
    del x
    gc.collect()
    assert gone() is None
    own([memory.view(64, 64), 0])
    assert own.again((memory.as_strided((64, 64), (64, 1)), 0))


def test_few_plans_are_kept(device: Device):
    own = device.program(scaled())
    x = torch.zeros(64, 64)
    for n in range(KEPT + 1):
        own([x, -n])
    assert not own.again((x, 0)) and all(own.again((x, -n)) for n in range(1, KEPT + 1))


# -- arguments that kernels cannot take directly
# -------------------------------------------------------------------------


def test_tensors_with_gaps_are_copied_in_and_out(device: Device):
    own = device.program(scaled())
    x = torch.ones(64, 128)[:, ::2]
    device.on_launch = lambda name, *args: args[-1].mul_(3)
    own([x, 0])
    assert x.eq(27).all() and x.stride() == (128, 2)


@pytest.mark.parametrize(
    "given",
    [lambda: torch.ones(64, 1).expand(64, 64), lambda: torch.nn.Parameter(torch.ones(64, 64)).t()],
    ids=["expanded", "a view of a leaf"],
)
def test_what_is_only_read_is_not_copied_back(device: Device, given: Callable[[], torch.Tensor]):
    own = device.program(put())
    x, y = given(), device.heap.zeros((64, 64), torch.float32)
    version = x._version
    own([x, y])
    assert x._version == version, "autograd may have saved it"


def test_a_stand_in_that_is_only_read_is_not_copied_back(device: Device):
    own = device.program(fetched())
    x, y = torch.ones(64, 64), torch.zeros(64, 64)
    device.on_launch = lambda name, *args: [made.fill_(7) for made in own.memory._staged[0]]
    with pytest.warns(UserWarning, match="'X', which is not a symmetric tensor"):
        own([x, y])
    assert x.eq(1).all()


def test_a_tensor_with_gaps_that_requires_gradients_takes_results(device: Device):
    own = device.program(scaled())
    x = torch.ones(64, 64, requires_grad=True)
    device.on_launch = lambda name, *args: args[-1].mul_(3)
    own([x.t(), 0])
    assert x.eq(27).all()


def test_tensors_that_are_not_symmetric_are_staged_with_one_warning(device: Device):
    own = device.program(put())
    x, y = torch.ones(64, 64), torch.zeros(64, 64)
    device.on_launch = lambda name, *args: args[-4][0].copy_(args[-5] + 1)
    with pytest.warns(UserWarning, match="'Y', which is not a symmetric tensor"):
        own([x, y])
    assert y.eq(2).all() and x.eq(1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.fill_(5)
        assert own.again((x, y))
    assert y.eq(6).all(), "a plan copies, too"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_earlier_failure_is_raised_before_anything_is_launched(device: Device):
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    own(given)
    device.log.clear()
    device.guard.error = WaitTimeoutError("it hangs")
    with pytest.raises(WaitTimeoutError):
        own.again(tuple(given))
    assert device.names() == []


def test_a_call_that_breaks_off_stops_the_waits(device: Device):
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    device.broken = True
    with pytest.raises(RuntimeError, match="the launch failed"):
        own(given)
    assert device.guard.stopped


def test_a_capture_that_breaks_off_stops_nothing(device: Device):
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    own(given)
    device.broken = device.capturing = True
    with pytest.raises(RuntimeError, match="the launch failed"):
        own(given)
    device.broken = device.capturing = False
    assert not device.guard.stopped and own.again(tuple(given)) and device.names() == ["put_0", "replay"]


def test_programs_take_turns_on_streams(device: Device):
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    for stream in (7, 7, 9):
        device.stream = stream
        own(given)
    assert device.events == ["record 7", "record 7", "9 waits", "record 9"]
    device.capturing, device.stream = True, 11
    own(given)
    assert len(device.events) == 4, "what is captured has the order of its graph"


def test_what_reads_a_workspace_after_a_call_is_a_part_of_its_turn(device: Device):
    """Else the next call, on another stream, would not wait for it, and let peers write there."""
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    space = Workspace(own.team, own.device)
    device.stream = 7
    own(given)
    space.was_read()
    device.stream = 9
    own(given)
    assert device.events == ["record 7", "record 7", "9 waits", "record 9"]
    device.capturing = True
    space.was_read()
    assert len(device.events) == 4, "what is captured has the order of its graph"


def test_kept_rows_are_read_in_the_turn_of_the_call(monkeypatch: pytest.MonkeyPatch):
    module, log = import_module("tilescale.ops.ag_gemm"), []
    gathered = torch.zeros(2, 3, 8)
    space, team = SimpleNamespace(was_read=lambda: log.append("read")), SimpleNamespace(rank=0, size=2)
    monkeypatch.setattr(module.strategy, "overlaps", lambda job, team: True)
    monkeypatch.setattr(module, "_overlapped", lambda *given: ([], gathered))
    monkeypatch.setattr(module, "workspace_of", lambda team: space)
    for keeps in (False, True):
        module._gemms(torch.ones(3, 8), [torch.ones(8, 8)], None, None, keeps, team, "", False, [])
    assert log == ["read"]


def test_the_default_stream_needs_no_event_until_another_one_is_used(device: Device):
    own = device.program(put())
    given = [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    for stream, events in (
        (stream_order.DEFAULT, []),
        (stream_order.DEFAULT, []),
        (9, ["record 0", "9 waits", "record 9"]),
        (stream_order.DEFAULT, ["0 waits", "record 0"]),
        (stream_order.DEFAULT, ["record 0"]),
    ):
        device.stream = stream
        own(given)
        assert device.events == events
        device.events.clear()


def test_each_thread_that_calls_gets_the_device_first(device: Device, monkeypatch: pytest.MonkeyPatch):
    own, given = device.program(put()), [device.heap.zeros((64, 64), torch.float32) for _ in range(2)]
    own(given)
    threads: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: threads.append(threading.get_ident()))
    own(given)
    other = threading.Thread(target=own, args=(given,))
    other.start()
    other.join()
    own(given)
    assert threads == [other.ident, threading.get_ident()]


# -- lowering once -----------------------------------------------------------------------------------------------------


def test_a_kernel_is_lowered_once_for_its_own_machine(monkeypatch: pytest.MonkeyPatch):
    made = []
    cuda = backends.generator(Machine.load("h100-sxm-8"))

    def lower(program: Any, target: backends.Target) -> Any:
        made.append(target)
        return cuda.lower(program, target)

    counted = backends.Backend("cuda", available=lambda: True, lower=lower, priority=10, generates=True)
    monkeypatch.setattr(backends.base, "_BACKENDS", [counted])
    kernel = tilescale.compile(put(), machine="h100-sxm-8")
    assert "put_0_kernel" in kernel.source and "barrier" not in kernel.schedule
    assert backends.choose(kernel.program, kernel._lowered).kernels
    assert [(t.machine.name, t.sizes) for t in made] == [("h100-sxm-8", (("device", 2),))]


def test_the_target_says_how_many_devices_there_are():
    @T.prim_func
    def total(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=T.ALL):
            with T.Scale("device"):
                T.allreduce(X)

    program = tilescale.compile(total).program
    machine = tilescale.current_machine()
    assert backends.Target.of(program, machine).sizes == (("device", None),)
    assert backends.Target.of(program, machine, 6).sizes == (("device", 6),)


def test_why_a_machine_does_not_run_a_program_is_said_of_that_machine():
    with tilescale.use_machine("mi300x-8"):

        @T.prim_func
        def waves(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=2, block=1, threads=128):
                with T.Scale("block"), T.Scale("wavefront") as (w, _):
                    X[w] = 1

        kernel = tilescale.compile(waves)
    cuda = backends.generator(Machine.load("h100-sxm-8"))
    assert kernel._lowered(cuda).lowered.target.machine.name == "mi300x-8"
