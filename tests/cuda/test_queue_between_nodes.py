# SPDX-License-Identifier: MIT
"""Copy queues whose data go to other nodes: actions of every rank, on threads, compared with the emulator."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.host_ranks import Post
from tests.cuda.support import lowered, notes, program
from tests.cuda.test_device_phases import steps
from tests.cuda.test_execute_queue import Queue, move
from tests.cuda.test_nodes import BY_NODE, FLAT, LOCAL, RANKS, Rank, machine  # noqa: F401 - a fixture
from tilescale.backends.cuda import headers
from tilescale.backends.cuda.running import occupancy, queued, queued_exchange, stream_memory
from tilescale.backends.cuda.running.queue_watch import QueueWait
from tilescale.backends.cuda.running.steps import ProgramCall
from tilescale.backends.cuda.running.stream_memory import WordWrite
from tilescale.backends.cuda.running.sums import FlagSums
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.plan import plan
from tilescale.backends.tilelang.lowering.queued import leads_out
from tilescale.errors import LaunchError, UnsupportedError
from tilescale.hda import Machine
from tilescale.program.waiting import first_wait

ROWS, COLUMNS, CHUNK = 10, 6, 4
CHUNKS = 3


def queue_program(statements: Any, level: str, sizes: dict[str, int], units: int) -> Any:
    """Traces the macro `statements(X, Y, flags, done, rank, size)`; programs signal `done` and await all chunks."""

    @T.prim_func
    def f(
        X: T.Tensor((units, ROWS, COLUMNS), "float32"),
        Y: T.Tensor((units, ROWS, COLUMNS), "float32"),
        Z: T.Tensor((units, CHUNKS), "int32"),
    ):
        with T.Kernel(**sizes, block=1, threads=32):
            flags = T.alloc_flags((units, CHUNKS))
            done = T.alloc_flags((1,))
            with T.Scale(level) as (rank, size):
                statements(X, Y, flags, done, rank, size)
            with T.Scale("block"):
                T.signal(done[0])
                for unit, chunk in T.grid(units, CHUNKS):
                    if unit != rank:
                        T.wait(flags[unit, chunk], ">=", 1)
                        Z[unit, chunk] = flags[unit, chunk]

    return f


@T.macro
def gathered(X, Y, flags, done, rank, size):
    T.all_gather(X[rank, 0:ROWS, 0:COLUMNS], Y, signal=flags, chunk=CHUNK)


@T.macro
def exchanged(X, Y, flags, done, rank, size):
    T.all_to_all(X, Y, signal=flags, chunk=CHUNK)


@T.macro
def copied(X, Y, flags, done, rank, size):
    for step in T.serial(1, size):
        for chunk in T.serial(CHUNKS):
            if chunk < CHUNKS - 1:
                T.copy(
                    X[rank, chunk * CHUNK : chunk * CHUNK + CHUNK, :],
                    Y[rank, chunk * CHUNK : chunk * CHUNK + CHUNK, :],
                    dst=(rank + step) % size,
                    signal=flags[rank, chunk],
                    value=chunk + 1,
                    after=(done[0], ">=", 1),
                )
            else:
                T.copy(
                    X[rank, ROWS - 2 : ROWS, :],
                    Y[rank, ROWS - 2 : ROWS, :],
                    dst=(rank + step) % size,
                    signal=flags[rank, chunk],
                    after=(done[0], ">=", 1),
                )


class Far(Rank):
    """A rank with a copy queue, which does at once what is added to it."""

    gpu = staticmethod(lambda rank: rank)
    """The GPU of a rank."""

    def __init__(self, rank: int, target: LoweringTarget, traced: Any, memory: dict[str, torch.Tensor], post: Post):
        super().__init__(rank, target, traced, [memory[p.name] for p in traced.parameters], post)
        self.memories, self.queue_transport, self.sums, self.sites = memory, post.of(rank), FlagSums(), []
        self.named, self.queue_waits = set(), False
        self.world = SimpleNamespace(on_my_gpu=lambda other: self.gpu(other) == self.gpu(rank))
        self.team.ranks = tuple(range(target.devices))
        self.memory = SimpleNamespace(declare=lambda workspace: None, tensor=lambda w, call: memory[w.name][rank])
        self.log: list[Any] = []
        self.guard = SimpleNamespace(watch=SimpleNamespace(wait=lambda place: self.log.append(place) or []))

    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        return next(m for m in self.memories.values() if m[self.team.rank].data_ptr() == tensor.data_ptr())


def run_all(
    func: Any, sizes: dict[str, int], units: int, described: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]], list[Far]]:
    """Tensors of all ranks after a run on threads, those after an emulation, and the ranks."""
    here = threading.local()

    def own_queue(device: torch.device) -> Queue:
        here.queue = getattr(here, "queue", None) or Queue([])
        return here.queue

    for module in (queued, queued_exchange):
        monkeypatch.setattr(module, "copy_queue", own_queue)
    monkeypatch.setattr(stream_memory, "copy", lambda stream, part: move(part))

    def written(stream: Any, *operations: WordWrite) -> None:
        for word, value in ((each.word, each.value) for each in operations):
            ctypes.memmove(word.address, value.to_bytes(word.nbytes, "little"), word.nbytes)

    monkeypatch.setattr(stream_memory, "add", written)
    target = LoweringTarget(Machine.load(described), tuple(sizes.items()), 1 << 36, headers.__name__)
    traced = program(func, described)
    body, post = plan(traced, target)[0], Post(RANKS)
    memory = {
        "X": torch.randn(RANKS, units, ROWS, COLUMNS),
        "Y": torch.zeros(RANKS, units, ROWS, COLUMNS),
        "Z": torch.zeros(RANKS, units, CHUNKS, dtype=torch.int32),
        "flags": torch.zeros(RANKS, units, CHUNKS, dtype=torch.int32),
        "done": torch.zeros(RANKS, 1, dtype=torch.int32),
    }
    emulated = [[memory[name][rank].clone() for name in "XYZ"] for rank in range(RANKS)]
    ranks = [Far(rank, target, traced, memory, post) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        for done in [pool.submit(own.run, body, ProgramCall(own.values)) for own in ranks]:
            done.result(timeout=60)
    tilescale.emulate(func, emulated)
    return memory, emulated, ranks


@pytest.mark.parametrize(("level", "sizes", "units"), [("node", BY_NODE, 2), ("device", FLAT, 4)], ids=["node", "flat"])
@pytest.mark.parametrize("statements", [gathered, exchanged, copied], ids=["gather", "all-to-all", "copies"])
def test_every_rank_has_what_the_emulator_says(
    statements: Any, level: str, sizes: Any, units: int, machine: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
):
    func = queue_program(statements, level, sizes, units)
    memory, emulated, ranks = run_all(func, sizes, units, machine, monkeypatch)
    for rank in range(RANKS):
        _, wanted, flags = emulated[rank]
        assert torch.equal(memory["Y"][rank], wanted), f"rank {rank}"
        me = ranks[rank].rank(level)
        others = [unit for unit in range(units) if unit != me]
        assert torch.equal(memory["flags"][rank][others], flags[others]), f"flags of rank {rank}"
    if statements is copied:
        assert all(isinstance(place, QueueWait) for own in ranks for place in own.log) and ranks[0].log
        assert all(own.queue_waits for own in ranks)


def test_copies_between_devices_of_one_gpu_go_through_the_host(
    machine: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
):
    """Copy engines move nothing within one device's memory, also where other copies go to another node."""
    copies: list[tuple[int, int]] = []
    monkeypatch.setattr(Far, "gpu", staticmethod(lambda rank: rank // LOCAL))
    by_host = stream_memory.by_host
    monkeypatch.setattr(
        stream_memory, "by_host", lambda part, room: copies.append((part.source, part.target)) or by_host(part, room)
    )
    memory, emulated, _ = run_all(queue_program(copied, "device", FLAT, RANKS), FLAT, RANKS, machine, monkeypatch)
    assert len(copies) == CHUNKS * RANKS * (LOCAL - 1)
    for rank in range(RANKS):
        assert torch.equal(memory["Y"][rank], emulated[rank][1])


def test_the_schedule_says_so(machine: str):  # noqa: F811
    func = queue_program(gathered, "device", FLAT, RANKS)
    assert steps(func, FLAT, machine) == ["all_gather queue", "grid 1 x 32", "join"]
    assert notes(func, machine)[0].endswith("asynchronous, on the copy queue")
    found = notes(queue_program(copied, "node", BY_NODE, 2), machine)
    assert "NCCL (by two they do not all share memory; asynchronous, on the copy queue)" in found[0]
    made = lowered(func, machine, RANKS).lowered
    assert leads_out(made.body, made.target)
    inside = lowered(queue_program(gathered, "device", BY_NODE, LOCAL), machine).lowered
    assert not leads_out(inside.body, inside.target)


def test_what_nccl_does_not_carry_is_not_for_the_queue(machine: str):  # noqa: F811
    func = queue_program(gathered, "device", FLAT, RANKS)
    with pytest.raises(UnsupportedError, match="cannot join these ranks"):
        steps(func, FLAT, machine, nccl=False)


def test_a_grid_that_waits_leaves_processors(machine: str):  # noqa: F811
    made = lowered(queue_program(gathered, "device", FLAT, RANKS), machine, RANKS).lowered
    where = first_wait(made.grids[-1], made.grids[-1].launch)
    assert where is not None and where.file == __file__
    room = occupancy.Occupancy(264, 2, 132)
    occupancy.check_spared("f", 256, room, 4, where)
    for asked in (257, None):
        with pytest.raises(LaunchError, match="4 of the 132 SMs; the others hold 256 programs") as caught:
            occupancy.check_spared("f", asked, room, 4, where)
        assert "launch at most 256 programs" in caught.value.hint
