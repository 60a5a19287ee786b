# SPDX-License-Identifier: MIT
"""Programs that share places in the workspaces of collectives: in any order of execution they compute what programs
with places of their own do, and all of them end."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from greenlet import getcurrent, greenlet

import tilescale
import tilescale.language as T
from tests.cuda import lowered_ranks
from tests.cuda.lowered_ranks import Job, Rank
from tests.cuda.support import lowered
from tests.cuda.test_thread_groups import interpret_on_all, kernel
from tilelang_core import ir
from tilescale.backends.tilelang.lowering import workspace_slots
from tilescale.backends.tilelang.lowering.arguments import KernelWorkspace
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel

RANKS, PROGRAMS, PLACES, RESIDENT, EXTENT = 3, 8, 3, 5, 2
MACHINE = "h200-sxm-8"


class Block(Rank):
    """One program of a rank: it yields to others at each access to device memory, and where it waits."""

    def __init__(self, job: Job, rank: int, tensors: Sequence[np.ndarray], number: int):
        super().__init__(job, rank, tensors)
        self.number = number

    def stmt(self, stmt: ir.Stmt) -> None:
        if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.THREAD_BINDING:
            self.values[stmt.loop_var] = self.number
            return super().stmt(stmt.body)
        if isinstance(stmt, ir.BufferStore | ir.Evaluate | ir.Bind):
            self.until(lambda: True)
        super().stmt(stmt)

    def until(self, ready: Callable[[], Any]) -> None:
        """Let others run at least once, then until something holds."""
        getcurrent().parent.switch(ready)


def _wait(block: Block, args: list[Any]) -> None:
    flags, index, _, wanted = args[:4]
    block.until(lambda: flags[int(index)] == wanted)


def _signal(block: Block, args: list[Any]) -> None:
    flags, index, _, value = args[:4]
    flags[int(index)] = value


def _barrier(block: Block, args: list[Any]) -> None:
    counters, _, slot, rank, ranks, index, epochs = args[:7]
    epoch = epochs[int(index)] = epochs[int(index)] + 1
    first = int(index) * ranks
    for peer in counters:
        block.until(lambda: True)
        peer[first + rank] = epoch
    own = counters[slot]
    for peer in range(ranks):
        block.until(lambda peer=peer: own[first + peer] >= epoch)


def _reduce_tile(block: Block, args: list[Any]) -> None:
    tile, inboxes, _, (rank, size, _, _, shift, slots), program, programs, counts, number = args[:8]

    def words(sender: int, receiver: int) -> np.ndarray:
        row = int(number) % 2 * (size - 1) + (sender - receiver - 1) % size
        return inboxes[(receiver + shift) % slots][row * programs + int(program)]

    mine, total = tile.reshape(-1).copy(), 0
    for peer in range(size):
        block.until(lambda: True)
        if peer != rank:
            words(rank, peer)[0::2], words(rank, peer)[1::2] = mine.view("int32"), number
    for sender in range(size):
        if sender != rank:
            block.until(lambda sender=sender: (words(sender, rank)[1::2] == number).all())
        total = total + (mine if sender == rank else words(sender, rank)[0::2].copy().view(tile.dtype))
    tile[...] = total.reshape(tile.shape)
    counts[int(program)] = number


FUNCTIONS = {"wait": _wait, "signal": _signal, "barrier": _barrier, "reduce_tile": _reduce_tile}


def interleaved(kernel: LoweredKernel, tensors: Sequence[Sequence[np.ndarray]], seed: int, calls: int = 1) -> None:
    """Run a kernel on all ranks, `RESIDENT` programs of a rank at once, which start in order, interleaved at random."""
    job, choose = Job(kernel, RANKS, RANKS), random.Random(seed)
    for _ in range(calls):
        _call(job, tensors, choose)


def _call(job: Job, tensors: Sequence[Sequence[np.ndarray]], choose: random.Random) -> None:
    left = [iter(range(PROGRAMS)) for _ in range(RANKS)]
    running: dict[greenlet, tuple[int, Callable[[], Any]]] = {}

    def start(rank: int) -> None:
        for number in itertools.islice(left[rank], 1):
            running[greenlet(Block(job, rank, tensors[rank], number).run)] = rank, lambda: True

    for rank in [*range(RANKS)] * RESIDENT:
        start(rank)
    while running:
        able = [block for block, (_, ready) in running.items() if ready()]
        assert able, "all wait for one another"
        block = choose.choice(able)
        ready = block.switch()
        rank, _ = running.pop(block)
        if block.dead:
            start(rank)
        else:
            running[block] = rank, ready


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workspace_slots, "held", lambda *_: PLACES)
    monkeypatch.setattr(lowered_ranks, "FUNCTIONS", FUNCTIONS)
    with tilescale.use_machine(MACHINE):
        yield


def sums(tickets: int = 2, barrier: bool = False, level: str = "l1", extent: int = EXTENT) -> Any:
    """Each program adds up tiles of all devices, several times."""

    @T.prim_func
    def summed(X: T.Tensor((PROGRAMS, tickets, extent), "float32")):
        with T.Kernel(device=RANKS, block=PROGRAMS, threads=32) as bx:
            tile = T.alloc((extent,), "float32", level=level)
            with T.Scale("block"), T.Scale("device"):
                for turn in T.serial(tickets):
                    T.copy(X[bx, turn, 0], tile)
                    T.allreduce(tile)
                    T.copy(tile, X[bx, turn, 0])
                    if barrier:
                        T.barrier()

    return summed


def parts(tickets: int = 2) -> Any:
    """Scatter sums from each program to all devices, except every third program, which is idle."""

    @T.prim_func
    def scattered(
        X: T.Tensor((PROGRAMS, tickets, RANKS * EXTENT), "float32"), Y: T.Tensor((PROGRAMS, tickets, EXTENT), "float32")
    ):
        with T.Kernel(device=RANKS, block=PROGRAMS, threads=32) as bx:
            given = T.alloc((RANKS * EXTENT,), "float32", level="l1")
            taken = T.alloc((EXTENT,), "float32", level="l1")
            with T.Scale("block"), T.Scale("device"):
                if bx % 3 != 2:
                    for turn in T.serial(tickets):
                        T.copy(X[bx, turn, 0], given)
                        T.reduce_scatter(given, taken)
                        T.copy(taken, Y[bx, turn, 0])

    return scattered


def kernel_of(func: Any) -> LoweredKernel:
    (kernel,) = lowered(func, MACHINE, RANKS).kernels
    return kernel


def numbers(*shape: int) -> list[np.ndarray]:
    """Small whole numbers for each rank: their sums are exact in any order."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 100, shape).astype("float32") for _ in range(RANKS)]


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_sums_in_any_order(seed: int, barrier: bool):
    given = numbers(PROGRAMS, 2, EXTENT)
    tensors = [[x.copy()] for x in given]
    interleaved(kernel_of(sums(barrier=barrier)), tensors, seed, calls=2)
    want = sum(given) * RANKS
    assert all((mine == want).all() for (mine,) in tensors)


def test_tiles_in_registers_travel_as_rows_of_shared_memory():
    extent = 128
    kernel, given = kernel_of(sums(1, level="l0", extent=extent)), numbers(PROGRAMS, 1, extent)
    assert "exchange0_staged" in str(kernel.func)
    tensors = [[x.copy()] for x in given]
    interleaved(kernel, tensors, seed=0)
    assert all((mine == sum(given)).all() for (mine,) in tensors)


@pytest.mark.parametrize("seed", range(2))
def test_some_programs_have_none(seed: int):
    given = numbers(PROGRAMS, 2, RANKS * EXTENT)
    tensors = [[x, np.full((PROGRAMS, 2, EXTENT), -1, "float32")] for x in given]
    interleaved(kernel_of(parts()), tensors, seed)
    for rank, (_, got) in enumerate(tensors):
        want = sum(given)[..., rank * EXTENT : (rank + 1) * EXTENT].copy()
        want[2::3] = -1
        assert (got == want).all()


@pytest.mark.parametrize("lost", ["wait", "signal"])
def test_turns_are_needed(lost: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FUNCTIONS, lost, lambda block, args: None)
    given, found = numbers(PROGRAMS, 2, EXTENT), set()
    kernel = kernel_of(sums())
    for seed in range(3):
        tensors = [[x.copy()] for x in given]
        try:
            interleaved(kernel, tensors, seed)
            found.add(all((mine == sum(given)).all() for (mine,) in tensors))
        except AssertionError:
            found.add(False)
    assert False in found


def places(func: Any, devices: int = RANKS) -> set[int]:
    """Leading extents of what a program's kernel has for its places."""
    (kernel,) = lowered(func, MACHINE, devices).kernels
    own = [a for a in kernel.arguments if isinstance(a, KernelWorkspace)]
    return {a.shape[0] for a in own if a.name.startswith(("barrier_epochs", "messages", "tickets"))}


def test_grids_of_unknown_extent_share_places_too():
    n = T.dynamic("n")

    @T.prim_func
    def summed(X: T.Tensor((n, EXTENT), "float32")):
        with T.Kernel(device=RANKS, block=n, threads=32) as bx:
            tile = T.alloc((EXTENT,), "float32", level="l1")
            with T.Scale("block"), T.Scale("device"):
                T.copy(X[bx, 0], tile)
                T.allreduce(tile)
                T.copy(tile, X[bx, 0])

    assert places(summed) == {PLACES}


def test_a_turn_is_waited_for_where_the_first_collective_is():
    @T.prim_func
    def annotated(X: T.Tensor((PROGRAMS, EXTENT), "float32")):
        with T.Kernel(device=RANKS, block=PROGRAMS, threads=32) as bx:
            with T.Scale("block"), T.Scale("device"):
                T.annotate_min_blocks_per_sm(2)
                tile = T.alloc((EXTENT,), "float32", level="l1")
                T.copy(X[bx, 0], tile)
                T.allreduce(tile)
                T.copy(tile, X[bx, 0])

    text = str(kernel_of(annotated).func)
    assert text.index("min_blocks_per_sm") < text.index("tilescale::wait<") < text.index("tilescale::reduce_tile<")


def waiting(first: int) -> Any:
    """Programs add up tiles; before that one waits for another one of the grid, which may be started later."""

    @T.prim_func
    def waits(X: T.Tensor((PROGRAMS, EXTENT), "float32")):
        with T.Kernel(device=RANKS, block=PROGRAMS, threads=32) as bx:
            flags = T.alloc_flags(1)
            tile = T.alloc((EXTENT,), "float32", level="l1")
            with T.Scale("block"):
                if bx == first:
                    T.signal(flags[0], 1)
                if bx == 5:
                    T.wait(flags[0], ">=", 1)
                with T.Scale("device"):
                    T.copy(X[bx, 0], tile)
                    T.allreduce(tile)
                    T.copy(tile, X[bx, 0])

    return waits


def test_programs_that_wait_for_later_ones_keep_places_of_their_own():
    assert places(waiting(first=7)) == {PROGRAMS}
    assert places(waiting(first=0)) == {PLACES}


@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "all_gather"])
def test_the_emulator_tells_of_the_same_memory(operation: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    source, target = {"reduce_scatter": (512, 256), "all_gather": (256, 512)}.get(operation, (512, 512))

    @T.prim_func
    def many(X: T.Tensor((300, source), "float16"), Y: T.Tensor((300, target), "float16")):
        with T.Kernel(device=2, block=300, threads=1024) as bx:
            given = T.alloc((source,), "float16", level="l0")
            taken = T.alloc((target,), "float16", level="l0")
            with T.Scale("block"), T.Scale("device"):
                T.copy(X[bx, 0], given)
                if operation == "allreduce":
                    T.allreduce(given)
                else:
                    getattr(T, operation)(given, taken)

    with tilescale.use_machine(MACHINE):
        (kernel,) = lowered(many, MACHINE, 2).kernels
        report = tilescale.emulate(many, [[torch.zeros(300, n).half() for n in (source, target)] for _ in range(2)])
    exchanges = (a for a in kernel.arguments if getattr(a, "name", "").startswith("exchange"))
    (nbytes,) = {int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in exchanges}
    assert [[*did.workspaces.values()] for did in report.activity] == [[nbytes]] * 2


def test_memory_is_that_of_resident_programs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    side, extent = 8192, 128

    @T.prim_func
    def large(X: T.Tensor((side, side), "float32")):
        with T.Kernel(device=8, block=(side // extent, side // extent), threads=256) as (bx, by):
            tile = T.alloc((extent, extent), "float32", level="l0")
            with T.Scale("block"), T.Scale("device"):
                T.copy(X[by * extent, bx * extent], tile)
                T.allreduce(tile)
                T.copy(tile, X[by * extent, bx * extent])

    with tilescale.use_machine(MACHINE):
        made = lowered(large, MACHINE)
    (exchange,) = {a.shape for k in made.kernels for a in k.arguments if getattr(a, "name", "").startswith("exchange")}
    assert np.prod(exchange) * 4 < 600 << 20, "4 GiB with a place for each program"
    assert any(re.search(r"\b528 slots\b", note) for note in made.notes)


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_a_device_alone_exchanges_nothing(collective: str):
    @T.prim_func
    def program(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(device=1, block=4, threads=128) as b, T.Scale("block"):
            x, y = (T.alloc((16, 64), "float32", level="l0") for _ in range(2))
            T.copy(X[b * 16, 0], x)
            with T.Scale("device"):
                if collective in ("allreduce", "broadcast"):
                    getattr(T, collective)(x)
                    T.copy(x, y)
                else:
                    getattr(T, collective)(x, y)
            T.copy(y, Y[b * 16, 0])

    assert not any(isinstance(argument, KernelWorkspace) for argument in kernel(program).arguments)
    x = torch.randn(64, 64)
    _, y = interpret_on_all(program, [[x, torch.full((64, 64), torch.nan)]])
    assert torch.equal(x, y[0])
    report = tilescale.emulate(program, [[x, torch.full((64, 64), torch.nan)]])
    assert not report.activity[0].workspaces


def test_a_device_alone_may_synchronize():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32")):
        with T.Kernel(device=1, block=4, threads=32) as b, T.Scale("block"):
            with T.Scale("device"):
                T.barrier()
            X[b] = 1

    assert any(isinstance(argument, KernelWorkspace) for argument in kernel(program).arguments), "its own count"
