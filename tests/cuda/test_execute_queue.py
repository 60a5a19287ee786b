# SPDX-License-Identifier: MIT
"""Effects of a copy queue on memory and flags, and their order. The device's memory is the host's."""

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilescale.language as T
from tests.cuda import fakes
from tests.cuda.support import program
from tests.cuda.test_copy_queue import (
    CHUNK,
    COLUMNS,
    DEVICES,
    FLAGS,
    ROWS,
    after_the_grid,
    exchanged,
    gathered,
    on_devices,
    one_flag_each,
)
from tilelang_core import ir
from tilescale.backends.cuda import headers
from tilescale.backends.cuda.running import driver, queued, queued_exchange, stream_memory
from tilescale.backends.cuda.running.control import loop
from tilescale.backends.cuda.running.copy_queue import CopyQueue
from tilescale.backends.cuda.running.phases import host_step
from tilescale.backends.cuda.running.queue_watch import QueueWait
from tilescale.backends.cuda.running.steps import ProgramCall, in_order, run
from tilescale.backends.cuda.running.stream_memory import WaitCondition, Word, WordWrite, rows
from tilescale.backends.cuda.running.sums import FlagSums
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.plan import plan
from tilescale.errors import OutOfBoundsError, UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Control, Launch, Part, Sequence

# -- copies of memory --------------------------------------------------------------------------------------------------


def move(part: Any) -> None:
    """A copy as the copy engine makes it."""
    for row in range(part.height):
        ctypes.memmove(part.target + row * part.target_pitch, part.source + row * part.source_pitch, part.width)


@given(st.data())
def test_rows_make_the_target_what_the_source_is(data: Any):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    cut = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in shape]
    region = tuple(slice(a, b) for a, b in cut)
    order = data.draw(st.permutations(range(len(shape))))
    given_ = torch.rand(shape)[region]
    whole = torch.zeros([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    wanted = whole.clone()
    wanted[region] = given_
    for part in rows(whole[region], given_):
        move(part)
    assert torch.equal(whole, wanted)


def test_rows_are_as_few_as_can_be():
    a, b = torch.zeros(8, 16, 32), torch.zeros(8, 16, 64)
    assert [(r.width, r.height) for r in rows(a, torch.zeros(8, 16, 32))] == [(8 * 16 * 32 * 4, 1)]
    assert [(r.width, r.height, r.source_pitch) for r in rows(a, b[:, :, 32:])] == [(128, 128, 256)]
    assert [(r.width, r.height) for r in rows(a[1:3, :2], b[1:3, :2, :32])] == [(128, 2)] * 2


# -- what the queue does -----------------------------------------------------------------------------------------------


class Queue(CopyQueue):
    """A queue without a device."""

    def __init__(self, done: list[Any]):
        self.stream, self._held, self._host, self._done = None, None, [], done

    def start(self) -> None:
        self.add(lambda: self._done.append("start"))

    def join(self) -> None:
        self.flush()
        self._done.append("join")


class Device:
    """A rank whose memory is the host's: what it launches is done at once, and written down in `done`."""

    def __init__(self, func: Any, rank: int, memory: dict[str, torch.Tensor], gpus: int = DEVICES):
        self.program = program(func)
        self.team, self.device = SimpleNamespace(rank=rank, ranks=tuple(range(DEVICES))), torch.device("cpu")
        self.world = SimpleNamespace(on_my_gpu=lambda other: other % gpus == rank % gpus)
        self.sizes = (("device", DEVICES),)
        self.reached: set[int] = set()
        self.named: set[int] = set()
        self.sites: list[Any] = []
        self.sums = FlagSums()
        self.tensors, self.done = memory, []
        self.memory = SimpleNamespace(declare=lambda workspace: None, tensor=lambda w, call: memory[w.name][rank])
        self.peer_group = SimpleNamespace(everywhere=self._peers, slot=lambda p: p)
        self.guard = SimpleNamespace(watch=SimpleNamespace(wait=lambda place: [place]))
        self.queue: Any = Queue(self.done)

    def _peers(self, tensor: torch.Tensor) -> torch.Tensor:
        return next(m for m in self.tensors.values() if m[self.team.rank].data_ptr() == tensor.data_ptr())

    def rank(self, level: str) -> int:
        return self.team.rank

    def run(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """One call; what it did, addresses as (tensor, device, offset in bytes)."""
        target = self.target = LoweringTarget(Machine.load("h200-sxm-8"), self.sizes, 1 << 36, headers.__name__)
        for module in (queued, queued_exchange):
            monkeypatch.setattr(module, "copy_queue", lambda device: self.queue)
        monkeypatch.setattr(stream_memory, "copy", lambda stream, part: self._copied(part))
        monkeypatch.setattr(stream_memory, "add", lambda stream, *operations: list(map(self._acted, operations)))
        values = [self.tensors[p.name][self.team.rank] for p in self.program.parameters]
        call = ProgramCall(values)
        run(in_order(self._steps(plan(self.program, target)[0]))(call))
        return self.done

    def _steps(self, part: Part) -> list[Any]:
        if isinstance(part, HostStep):
            return [host_step(self, part)]
        if isinstance(part, Control) and isinstance(part.stmt, ir.For):
            return [loop(self, part.stmt, in_order(self._steps(part.parts[0])), None)]
        if isinstance(part, Launch):
            return self._steps(part.body)
        return [step for p in part.parts for step in self._steps(p)] if isinstance(part, Sequence) else []

    def _copied(self, part: Any) -> None:
        move(part)
        self.done.append(("copy", self._place(part.target)))

    def _acted(self, operation: QueueWait | WordWrite) -> None:
        if not isinstance(operation, WordWrite):
            return self.done.append(operation)
        word, value = operation.word, operation.value
        ctypes.memmove(word.address, value.to_bytes(word.nbytes, "little"), word.nbytes)
        self.done.append(("write", self._place(word.address), value))

    def _place(self, address: int) -> tuple[str, int, int]:
        for name, tensor in self.tensors.items():
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                each = tensor[0].nbytes
                return name, offset // each, offset % each
        if any(memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes for memory in self.queue._host):
            return "host", 0, 0
        raise AssertionError("outside of all memory")


def memory() -> dict[str, torch.Tensor]:
    """All devices' tensors of `on_devices`."""
    flags = {name: torch.zeros(DEVICES, *shape, dtype=torch.int32) for name, shape in FLAG_SHAPES.items()}
    return {"X": torch.rand(DEVICES, ROWS, COLUMNS), "Y": torch.zeros(DEVICES, DEVICES, ROWS, COLUMNS), **flags}


FLAG_SHAPES = {"F": (DEVICES, FLAGS), "flags": (DEVICES, FLAGS), "done": (2,)}


def test_a_queue_starts_once_for_what_the_main_stream_did():
    queue = Queue([])
    move, grid = partial(queue.add, print), partial(print, "grid")
    given = [queue.start, move, queue.hold, queue.start, move, queue.start, grid, queue.hold, queue.start, queue.join]
    kept = [queue.start, move, queue.hold, move, grid, queue.hold, queue.start, queue.join]
    assert queue.batched(given) == kept
    assert queue.batched(apart := [grid, queue.start, queue.join, queue.start]) == apart


def test_the_flag_of_a_copy_and_the_wait_of_the_next_are_one_batch(monkeypatch: pytest.MonkeyPatch):
    queue, batches = Queue([]), []
    monkeypatch.setattr(stream_memory, "add", lambda stream, *operations: batches.append(operations))

    def chunk(number: int) -> list[Any]:
        copy = partial(queue.add, lambda: batches.append(f"copy {number}"))
        words = [partial(queue.add_batch, parts=[lambda word=word: [f"{word} {number}"]]) for word in ("wait", "flag")]
        return [queue.hold, queue.start, words[0], copy, words[1]]

    launches = [*chunk(0), *chunk(1), grid := partial(batches.append, "grid"), *chunk(2), queue.join]
    kept = queue.batched(launches)
    assert kept.count(queue.hold) == kept.count(queue.start) == 2
    assert kept.index(grid) < max(i for i, launch in enumerate(kept) if launch == queue.hold)
    run(kept)
    one_after_the_other = [("wait 0",), "copy 0", ("flag 0", "wait 1"), "copy 1", ("flag 1",)]
    assert [each for each in batches if each != "grid"] == [*one_after_the_other, ("wait 2",), "copy 2", ("flag 2",)]


def test_a_batch_has_no_more_operations_than_the_driver_takes(monkeypatch: pytest.MonkeyPatch):
    calls: list[list[Any]] = []
    monkeypatch.setattr(driver, "call", lambda name, stream, count, operations, flags: calls.append(operations))
    monkeypatch.setattr(stream_memory, "_parameters", lambda operation: operation.value)
    word = Word(0, 4)
    stream_memory.add(SimpleNamespace(cuda_stream=0), *(WordWrite(word, value) for value in range(600)))
    assert sum(calls, []) == list(range(600)) and max(map(len, calls)) == stream_memory.MOST_OPERATIONS == 255


def test_a_gather_sends_chunk_by_chunk_to_the_next_device_first(monkeypatch):
    there = memory()
    done = [Device(on_devices(gathered), rank, there).run(monkeypatch) for rank in range(DEVICES)][1]
    assert torch.equal(there["Y"], there["X"].expand(DEVICES, -1, -1, -1)) and bool((there["flags"] == 1).all())
    assert done[:2] == ["join", "start"] and done[-1] == "join"
    flag = [4 * (FLAGS * 1 + chunk) for chunk in range(FLAGS)]
    assert done[2 : 2 + FLAGS] == [("write", ("flags", 1, at), 1) for at in flag]
    sent = done[2 + FLAGS : -1]
    assert [what[0] for what in sent] == ["copy", "write"] * FLAGS * 3
    assert [what[1][1] for what in sent[:: 2 * FLAGS]] == [2, 3, 0]
    assert [what[1][2] for what in sent[0 : 2 * FLAGS : 2]] == [4 * COLUMNS * (ROWS + CHUNK * n) for n in range(FLAGS)]
    assert [what[1:] for what in sent[1 : 2 * FLAGS : 2]] == [(("flags", 2, at), 1) for at in flag]


def test_a_gather_raises_the_flags_of_its_layer(monkeypatch):
    @T.prim_func
    def layers(X: T.Tensor((2, ROWS, COLUMNS), "float32"), Y: T.Tensor((2, DEVICES * ROWS, COLUMNS), "float32")):
        with T.Kernel(device=DEVICES, block=1, threads=32):
            arrived = T.alloc_flags((2, DEVICES, FLAGS))
            with T.Scale("device"):
                for layer in T.serial(2):
                    T.all_gather(X[layer, ...], Y[layer, ...], dim=1, signal=arrived[layer, ...], chunk=CHUNK)

    there = {
        "X": torch.rand(DEVICES, 2, ROWS, COLUMNS),
        "Y": torch.zeros(DEVICES, 2, DEVICES * ROWS, COLUMNS),
        "arrived": torch.zeros(DEVICES, 2, DEVICES, FLAGS, dtype=torch.int32),
    }
    done = [Device(layers, rank, there).run(monkeypatch) for rank in range(DEVICES)][1]
    assert torch.equal(there["Y"], torch.cat(list(there["X"]), dim=1).expand(DEVICES, -1, -1, -1))
    assert bool((there["arrived"] == 1).all())
    words = [what[1][2] for what in done if what[0] == "write" and what[1][1] == 2]
    assert words == [4 * (FLAGS * (DEVICES * layer + 1) + chunk) for layer in range(2) for chunk in range(FLAGS)]


@pytest.mark.parametrize("exchanges", [False, True])
def test_columns_go_as_one_copy_for_each_chunk(monkeypatch, exchanges: bool):
    wide, chunks = DEVICES * COLUMNS, -(-COLUMNS // CHUNK)

    @T.prim_func
    def columns(X: T.Tensor((ROWS, wide if exchanges else COLUMNS)), Y: T.Tensor((ROWS, wide))):
        with T.Kernel(device=DEVICES, block=1, threads=32):
            flags = T.alloc_flags((DEVICES, chunks))
            with T.Scale("device"):
                if exchanges:
                    T.all_to_all(X, Y, dim=1, signal=flags, chunk=CHUNK)
                else:
                    T.all_gather(X, Y, dim=1, signal=flags, chunk=CHUNK)

    there = {
        "X": torch.rand(DEVICES, ROWS, wide if exchanges else COLUMNS),
        "Y": torch.zeros(DEVICES, ROWS, wide),
        "flags": torch.zeros(DEVICES, DEVICES, chunks, dtype=torch.int32),
    }
    done = [Device(columns, rank, there).run(monkeypatch) for rank in range(DEVICES)][1]
    for rank, found in enumerate(there["Y"]):
        mine = slice(rank * COLUMNS, (rank + 1) * COLUMNS) if exchanges else slice(None)
        assert torch.equal(found, torch.cat([x[:, mine] for x in there["X"]], dim=1))
    assert bool((there["flags"] == 1).all())
    assert [what[0] for what in done[2 + chunks : -1]] == ["copy", "write"] * chunks * (DEVICES - 1)
    assert [what[1] for what in done[2 + chunks : -1 : 2]][:chunks] == [
        ("Y", 2, 4 * (COLUMNS + CHUNK * n)) for n in range(chunks)
    ]


def test_a_gather_in_place_copies_nothing_at_home(monkeypatch):
    @T.macro
    def in_place(X, Y, F, flags, done, rank, size):
        T.all_gather(Y[rank, 0:ROWS, 0:COLUMNS], Y, signal=flags, chunk=CHUNK)

    there = memory()
    for rank in range(DEVICES):
        there["Y"][rank, rank] = there["X"][rank]
    done = [Device(on_devices(in_place), rank, there).run(monkeypatch) for rank in range(DEVICES)]
    assert torch.equal(there["Y"], there["X"].expand(DEVICES, -1, -1, -1)) and bool((there["flags"] == 1).all())
    assert all(what[0] == "start" and what.count("join") == 1 for what in done)


def test_an_all_to_all_sends_each_device_its_part(monkeypatch):
    there = memory() | {"given": torch.rand(DEVICES, DEVICES, ROWS, COLUMNS)}
    done = [Device(on_devices(exchanged), rank, there).run(monkeypatch) for rank in range(DEVICES)][1]
    assert torch.equal(there["Y"], there["given"].transpose(0, 1)) and bool((there["flags"] == 1).all())
    assert done[:2] == ["join", "start"] and done[-1] == "join"
    sent = done[2 + FLAGS : -1]
    assert [what[0] for what in sent] == ["copy", "write"] * FLAGS * 3
    assert [what[1][1] for what in sent[:: 2 * FLAGS]] == [2, 3, 0]


def test_flags_are_written_as_sums_from_zero_in_every_call(monkeypatch):
    there = memory()
    device = Device(on_devices(one_flag_each), 3, there)
    for _ in range(2):
        device.done.clear()
        done = device.run(monkeypatch)
        assert [what[1:] for what in done if what[0] == "write"] == [(("flags", 0, 0), 1), (("flags", 0, 0), 2)]
        assert done == ["start", *done[1:3], "start", *done[4:6], "join"]
    assert torch.equal(there["Y"][0, 3], there["X"][3])


def test_a_copy_to_the_device_itself_is_not_for_the_queue(monkeypatch):
    @T.macro
    def to_all(X, Y, F, flags, done, rank, size):
        for step in T.serial(2):
            T.copy(X, Y[rank, 0, 0], dst=(rank + step) % size, signal=flags[rank, step], value=5)

    there = memory()
    done = Device(on_devices(to_all), 2, there).run(monkeypatch)
    assert done[:3] == ["join", "start", ("write", ("flags", 2, 4 * 2 * FLAGS), 5)]
    assert [what[0] for what in done[4:6]] == ["copy", "write"]
    assert torch.equal(there["Y"][2, 2], there["X"][2]) and torch.equal(there["Y"][3, 2], there["X"][2])


def test_copies_between_devices_of_one_gpu_are_not_for_the_queue(monkeypatch):
    """A kernel writes them, for which the waiting grid may leave no SM."""
    there = memory()
    done = [Device(on_devices(gathered), rank, there, gpus=2).run(monkeypatch) for rank in range(DEVICES)][1]
    assert torch.equal(there["Y"], there["X"].expand(DEVICES, -1, -1, -1)) and bool((there["flags"] == 1).all())
    to = {what[1][1]: at for at, what in enumerate(done) if what[0] == "write"}
    assert [what[1][1] for what in done if what[0] == "copy"] == [2] * FLAGS + [0] * FLAGS
    first = min(at for at, what in enumerate(done) if what[0] == "write" and what[1][1] == 3)
    assert done[first - 2 : to[3] + 1 : 3] == ["join"] * FLAGS and done[first - 1 : to[3] + 1 : 3] == ["start"] * FLAGS


@T.macro
def columns_after_the_grid(X, Y, F, flags, done, rank, size):
    to = (rank + 1) % size
    T.copy(X[:, 0:4], Y[rank, 0:ROWS, 0:4], dst=to, signal=flags[0, 0], after=(done[0], ">=", 1))


@pytest.mark.parametrize("statements", [after_the_grid, columns_after_the_grid])
def test_a_copy_that_has_to_wait_stays_on_the_queue(statements: Any, monkeypatch):
    """Between devices of one GPU it goes through the host: copy engines move nothing within one device's memory."""
    func, apart, beside = on_devices(statements), memory(), memory()
    for name in apart:
        beside[name].copy_(apart[name])
    alone = Device(func, 1, apart).run(monkeypatch)
    shared = Device(func, 1, beside, gpus=1).run(monkeypatch)
    assert [what[0] for what in shared if isinstance(what, tuple)] == ["copy", "copy", "write"]
    assert ("copy", ("host", 0, 0)) in shared
    assert len(shared) == len(alone) + 1 and shared[-2:] == alone[-2:]
    assert torch.equal(beside["Y"], apart["Y"]) and bool(beside["Y"].any())


def test_a_copy_waits_for_the_senders_flag(monkeypatch):
    there = memory()
    device = Device(on_devices(after_the_grid), 1, there)
    started = device.run(monkeypatch)
    word = Word(there["done"][1].data_ptr(), 4)
    assert started[:2] == ["start", QueueWait(0, 0, WaitCondition(word, ">=", 1))]
    site = device.sites[0]
    assert site.flag == "done" and site.compare == ">=" and site.where.file.endswith("test_copy_queue.py")
    assert device.queue_waits


def test_a_flag_outside_of_its_tensor_names_the_line(monkeypatch, mistake):
    @T.macro
    def beyond(X, Y, F, flags, done, rank, size):
        for k in T.serial(FLAGS, FLAGS + 1):
            T.copy(X, Y[rank, 0, 0], dst=0, signal=flags[rank, k])  # <-

    device = Device(on_devices(beyond), 1, memory())
    with mistake(OutOfBoundsError, f"element (1, {FLAGS}) of flags ({DEVICES}, {FLAGS})"):
        device.run(monkeypatch)


def test_what_waits_for_a_flag_is_added_after_the_kernels(monkeypatch):
    """So is what was started later."""

    @T.macro
    def both(X, Y, F, flags, done, rank, size):
        T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[0, 0])
        T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[0, 1], after=(done[0], ">=", 1))
        T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[0, 2])

    device, before = Device(on_devices(both), 1, memory()), []
    monkeypatch.setattr(device.queue, "flush", lambda: (before.extend(device.done), CopyQueue.flush(device.queue)))
    kinds = [what[0] if isinstance(what, tuple) else what for what in device.run(monkeypatch)]
    assert len(before) == 3 and kinds[:3] == ["start", "copy", "write"]
    assert kinds[3] == "start" and isinstance(kinds[4], QueueWait) and kinds[5:] == [
        "copy", "write", "start", "copy", "write", "join"
    ]  # fmt: skip


def test_a_copy_to_the_device_itself_does_not_overtake_one_that_waits(monkeypatch, mistake):
    @T.macro
    def overtakes(X, Y, F, flags, done, rank, size):
        T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[rank, 0], after=(done[0], ">=", 1))
        T.copy(X, Y[rank, 0, 0], dst=rank, signal=flags[rank, 1])  # <-

    device = Device(on_devices(overtakes), 1, memory())
    with mistake(UnsupportedError, "a copy of a device to itself"):
        device.run(monkeypatch)
    device.queue.drop()
    assert not device.queue.is_held


@pytest.mark.parametrize("parts", [1, 2])
def test_flags_are_zero_before_devices_synchronize_and_the_queue_is_joined_before_they_part(parts: int, monkeypatch):
    """They only synchronize before they part if a device does not wait for all parts that the others send."""

    @T.prim_func
    def program(G: T.Tensor((2, 4, 8), "float32"), Y: T.Tensor((2, 4), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as bx:
            flags = T.alloc_flags((2, 1))
            with T.Scale("device") as (rank, _):
                T.all_gather(G[rank, 0:4, :], G, signal=flags)
                T.barrier()
            with T.Scale("block"):
                if bx < parts:
                    T.wait(flags[bx, 0], ">=", 1)
                    Y[bx, 0] = G[bx, 0, 0]

    device = fakes.Device(monkeypatch)
    for module in (queued, queued_exchange):
        monkeypatch.setattr(module, "copy_queue", lambda _: Queue(device.log))
    monkeypatch.setattr(stream_memory, "copy", lambda stream, part: device.log.append("copy"))
    monkeypatch.setattr(stream_memory, "add", lambda stream, *operations: device.log.append("write"))
    own = device.program(program)
    given_ = device.heap.zeros((2, 4, 8), torch.float32), torch.zeros(2, 4)
    own(list(given_))
    # A barrier does not cover asynchronous copies of other devices.
    called = ["barrier", "start", "write", "copy", "write", "barrier", "program_0", "join"]
    assert device.names() == (called if parts == 2 else [*called, "barrier"])
    ((flags,),) = (made.parts.values() for made in own.memory._flags)
    flags.fill_(9)
    own._plans.clear()
    device.guard.barrier = lambda *_, **__: lambda: device.log.append(flags.tolist())
    own(list(given_))
    assert device.log[0] == [[0], [0]]
