# SPDX-License-Identifier: MIT
"""Tasks of one launch: what they wait for, and why a program is not fused."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import RaceError, UnsupportedError
from tilescale.hda import Machine
from tilescale.passes.persistent import rewrite
from tilescale.passes.persistent.placement import placed
from tilescale.passes.persistent.rewrite import persistent


@T.prim_func
def halves(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
    with T.Kernel(8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            Y[row * 8 + i, j] = X[row * 8 + i, j] * 2
    with T.Kernel(2, 4, threads=64) as (column, row):
        for i, j in T.Parallel(16, 16):
            Z[row * 16 + i, column * 16 + j] = Y[row * 16 + i, column * 16 + j] + 1


@T.prim_func
def in_one_kernel(X: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
    with T.Kernel(device=2, block=8, threads=64) as row:
        Y = T.alloc((64, 32), "float32", level="l2")
        begin = row * 8
        for i, j in T.Parallel(8, 32):
            Y[begin + i, j] = X[begin + i, j] * 2
        with T.Scale("device"):
            T.allreduce(Y)
        for i, j in T.Parallel(8, 32):
            Z[begin + i, j] = Y[begin + i, j] + 1


def ran(func: Any, shapes: list[tuple[int, ...]], devices: int, machine: Machine, **how: Any) -> list[torch.Tensor]:
    """Tensors of the first device after a run."""
    args = [[torch.arange(64.0 * 32).view(64, 32) % 7 + rank, *map(torch.zeros, shapes)] for rank in range(devices)]
    tilescale.emulate(func, args, machine=machine, time=False, **how)
    return args[0]


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "all_to_all"])
def test_collectives_of_one_device(collective: str, small: Machine):
    @T.prim_func
    def program(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
        with T.Kernel(device=1, block=8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                Y[row * 8 + i, j] = X[row * 8 + i, j] * 2
            with T.Scale("device"):
                getattr(T, collective)(Y, Z)

    x, _, z = ran(persistent(program, small)[0], [(64, 32)] * 2, 1, small)
    assert z.equal(2 * x)


def test_tasks_wait_for_the_chunks_that_they_read(small: Machine):
    fused, tasks = persistent(halves, small)
    (need,) = tasks.needs
    assert need.counter.shape == (4,)
    assert need.counter.arrivals.tolist() == [2, 2, 2, 2]
    assert [p.first for p in tasks.placements] == [0, 3]
    x, _, z = ran(fused, [(64, 32)] * 2, 1, small)
    assert z.equal(2 * x + 1)


@pytest.mark.parametrize(("counts", "blocks"), [((3, 500), 132), ((3, 5), 5)])
def test_no_block_is_without_a_task_or_an_sm(counts: tuple[int, ...], blocks: int):
    """A block that is not resident would leave others waiting for its tasks."""
    assert [(p.blocks, p.first, p.count) for p in placed(counts, Machine.load("h200-sxm-8"))] == [
        (blocks, 0, counts[0]),
        (blocks, counts[0], counts[1]),
    ]


def test_phases_of_one_kernel_share_its_workspace(small: Machine):
    fused, tasks = persistent(in_one_kernel, small)
    assert [need.earlier for need in tasks.needs] == [0, 1]
    x, z = ran(fused, [(64, 32)], 2, small)
    assert z.equal(2 * (x + x + 1) + 1)


@pytest.mark.parametrize(
    ("rows", "columns", "tasks"), [(64, 2048, 128), (64, 32, 8), (64, 4096, 128), (264, 2048, 264), (7, 36, 1)]
)
def test_each_block_sums_as_few_tiles_as_fit(rows: int, columns: int, tasks: int):
    """132 blocks, tiles of 256 to 2048 elements: with 256 tiles of half a row, half of the blocks had two of them."""

    @T.prim_func
    def summed(X: T.Tensor((rows, columns), "float32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("device"):
                T.allreduce(X)
            for i, j in T.Parallel(1, 4):
                X[i, j] = X[i, j] + 1

    _, found = persistent(summed, Machine.load("h200-sxm-8"))
    assert [placement.count for placement in found.placements] == [tasks, 1]


def test_tiles_that_are_the_same_in_each_task_are_loaded_once(small: Machine):
    @T.prim_func
    def added(X: T.Tensor((8, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
        with T.Kernel(8, threads=64) as row:
            x = T.alloc((8, 32), "float32", level="l1")
            y = T.alloc((8, 32), "float32", level="l1")
            T.copy(X, x)
            T.copy(Y[row * 8, 0], y)
            for i, j in T.Parallel(8, 32):
                Z[row * 8 + i, j] = x[i, j] + y[i, j]
        with T.Kernel(2, threads=64) as row:
            for i, j in T.Parallel(32, 32):
                Z[row * 32 + i, j] = Z[row * 32 + i, j] * 2

    lines = tilescale.compile(added, machine=small, schedule="persistent").python.splitlines()
    once, each = (next(line for line in lines if f"T.copy({tensor}" in line) for tensor in "XY")
    assert len(once) - len(once.lstrip()) < len(each) - len(each.lstrip())


def test_what_is_computed_alike_for_each_task_is_computed_once(small: Machine):
    @T.prim_func
    def added(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
        with T.Kernel(8, threads=64) as row:
            total = T.alloc((32,), "float32", level="l0")
            given = T.alloc((8, 32), "float32", level="l0")
            T.clear(total)
            for each in T.serial(64):
                for j in T.Parallel(32):
                    total[j] += X[each, j]
            T.clear(given)
            for i, j in T.Parallel(8, 32):
                given[i, j] += Y[row * 8 + i, j] + total[j]
            T.copy(given, Z[row * 8, 0])
        with T.Kernel(2, threads=64) as row:
            for i, j in T.Parallel(32, 32):
                Z[row * 32 + i, j] = Z[row * 32 + i, j] * 2

    kernel = tilescale.compile(added, machine=small, schedule="persistent")
    text = kernel.python
    assert text.index("total[") < text.index("for iteration in") < text.index("T.fill(given")
    x, _, z = ran(kernel.ir, [(64, 32), (64, 32)], 1, small, check="all")
    assert z.equal(2 * x.sum(0).expand(64, 32))


def test_annotations_of_launches_are_joined():
    notes = [("layouts", {"a": 1}), (rewrite.IN_ORDER, 1)], [("layouts", {"b": 2}), ("other", 3)]
    joined = rewrite._notes([SimpleNamespace(notes=of) for of in notes], [], None)
    assert joined == {"layouts": {"a": 1, "b": 2}, "other": 3, rewrite.FLAGS: {}, rewrite.TASKS: 1}


def test_a_missing_wait_is_a_race(small: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rewrite, "needs_of", lambda *_: [])
    fused, _ = persistent(halves, small)
    with pytest.raises(RaceError):
        ran(fused, [(64, 32)] * 2, 1, small, check="all")


def test_a_dependence_through_another_phase_needs_no_wait(small: Machine):
    @T.prim_func
    def thrice(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32")):
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                Y[row * 8 + i, j] = X[row * 8 + i, j] * 2
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                X[row * 8 + i, j] = Y[row * 8 + i, j] * 2
        with T.Kernel(4, threads=64) as row:
            for i, j in T.Parallel(16, 32):
                X[row * 16 + i, j] = X[row * 16 + i, j] + Y[row * 16 + i, j]

    _, tasks = persistent(thrice, small)
    assert [(need.earlier, need.later) for need in tasks.needs] == [(0, 1), (1, 2)]


def test_counters_of_a_tensor_in_several_chunks_have_names_of_their_own(small: Machine):
    @T.prim_func
    def twice(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                X[row * 8 + i, j] = 1
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                Y[row * 8 + i, j] = X[row * 8 + i, j]
        with T.Kernel(2, threads=64) as row:
            for i, j in T.Parallel(32, 32):
                Z[row * 32 + i, j] = X[row * 32 + i, j]

    _, tasks = persistent(twice, small)
    counters = [need.counter for need in tasks.needs]
    assert [(c.name, c.shape) for c in counters] == [("phase0_X", (8,)), ("phase0_1_X", (2,))]


def test_a_later_phase_waits_by_the_counters_of_another_one_for_a_few_more_tasks(small: Machine):
    @T.prim_func
    def twice(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                X[row * 8 + i, j] = 1
        with T.Kernel(2, threads=64) as row:
            for i, j in T.Parallel(32, 32):
                Y[row * 32 + i, j] = X[row * 32 + i, j]
        with T.Kernel(4, threads=64) as row:
            for i, j in T.Parallel(16, 32):
                Z[row * 16 + i, j] = X[row * 16 + i, j]

    fused, tasks = persistent(twice, small)
    assert [(n.counter.name, n.counter.shape) for n in tasks.needs] == [("phase0_X", (2,))] * 2
    shapes = [(64, 32)] * 2
    assert all(a.equal(b) for a, b in zip(ran(twice, shapes, 1, small), ran(fused, shapes, 1, small), strict=True))


def test_iterations_of_a_loop_around_grids_follow_one_another(small: Machine):
    @T.prim_func
    def layers(X: T.Tensor((64, 32), "float32"), W: T.Tensor((3, 32), "float32"), Y: T.Tensor((64, 32), "float32")):
        for layer in T.serial(3):
            with T.Kernel(device=2, block=4, threads=64) as row:
                for i, j in T.Parallel(16, 32):
                    Y[row * 16 + i, j] = X[row * 16 + i, j] * 2 + W[layer, j]
                with T.Scale("device") as (rank, _):
                    last = rank + layer
                    T.allreduce(Y)
                for i, j in T.Parallel(16, 32):
                    X[row * 16 + i, j] = Y[row * 16 + i, j] + last

    fused, tasks = persistent(layers, small)
    assert [(n.earlier, n.later, n.previous) for n in tasks.needs] == [(0, 1, False), (1, 2, False), (2, 0, True)]
    x, w, _ = ran(layers, [(3, 32), (64, 32)], 2, small)
    again, _, _ = ran(fused, [(3, 32), (64, 32)], 2, small, check="all")
    assert x.equal(again)


@T.prim_func
def rotated(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((64, 32), "float32")):
    with T.Kernel(8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            Y[row * 8 + i, j] = X[row * 8 + i, j] * 2
    for layer in T.serial(1, 4):
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                Z[row * 8 + i, j] = Y[(7 - row) * 8 + i, j] + layer
        with T.Kernel(4, threads=64) as row:
            for i, j in T.Parallel(16, 32):
                Y[row * 16 + i, j] = Z[row * 16 + i, j]
    with T.Kernel(2, threads=64) as row:
        for i, j in T.Parallel(32, 32):
            Z[row * 32 + i, j] = Y[(1 - row) * 32 + i, j]


ORDER = [(0, 1, False), (1, 2, False), (1, 2, False), (2, 1, True), (2, 1, True), (2, 3, False), (2, 3, False)]
"""Of `rotated`: (earlier phase, later phase, in the previous iteration), for what is written and what was read."""


def test_tasks_wait_for_what_is_before_and_in_a_loop(small: Machine):
    fused, tasks = persistent(rotated, small)
    assert [(n.earlier, n.later, n.previous) for n in tasks.needs] == ORDER
    got, want = (ran(func, [(64, 32)] * 2, 1, small, check="all") for func in (fused, rotated))
    assert all(one.equal(other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("left_out", sorted(set(ORDER)))
def test_each_wait_of_a_loop_is_needed(
    left_out: tuple[int, int, bool], small: Machine, monkeypatch: pytest.MonkeyPatch
):
    needs_of = rewrite.needs_of
    monkeypatch.setattr(rewrite, "needs_of", lambda *given: [n for n in needs_of(*given) if n.key[:3] != left_out])
    fused, _ = persistent(rotated, small)
    with pytest.raises(RaceError):
        ran(fused, [(64, 32)] * 2, 1, small, check="all")


def test_loops_around_loops_of_phases_are_unrolled(small: Machine):
    @T.prim_func
    def steps(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32")):
        for step in T.serial(2):
            for layer in T.serial(3):
                with T.Kernel(8, threads=64) as row:
                    for i, j in T.Parallel(8, 32):
                        Y[row * 8 + i, j] = X[(7 - row) * 8 + i, j] + step * 3 + layer
                with T.Kernel(8, threads=64) as row:
                    for i, j in T.Parallel(8, 32):
                        X[row * 8 + i, j] = Y[row * 8 + i, j]

    kernel = tilescale.compile(steps, machine=small, schedule="persistent")
    assert kernel.python.count("in T.serial(3, annotations=") == 2
    got, want = (ran(func, [(64, 32)], 1, small, check="all") for func in (kernel.ir, steps))
    assert all(one.equal(other) for one, other in zip(got, want, strict=True))


def test_phases_in_such_a_loop_share_memory(small: Machine):
    """Taken as live in all iterations, the two tiles would not fit."""

    @T.prim_func
    def layers(X: T.Tensor((256, 128), "float32"), Y: T.Tensor((256, 128), "float32")):
        for _ in T.serial(2):
            with T.Kernel(device=1, block=1, threads=64):
                x = T.alloc((256, 128), "float32", level="l1")
                T.copy(X, x)
                T.copy(x, Y)
            with T.Kernel(device=1, block=1, threads=64):
                y = T.alloc((256, 128), "float32", level="l1")
                T.copy(Y, y)
                T.copy(y, X)

    kernel = tilescale.compile(layers, machine=small, schedule="persistent")
    assert kernel.source
    x = torch.randn(256, 128)
    tilescale.emulate(kernel.ir, [[x, y := torch.zeros(256, 128)]], machine=small, time=False, check="all")
    assert y.equal(x)


def test_an_index_in_memory_waits_for_the_whole_phase(small: Machine):
    @T.prim_func
    def gathered(X: T.Tensor((64, 32), "float32"), I: T.Tensor((64,), "int32"), Y: T.Tensor((64, 32), "float32")):  # noqa: E741
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                X[row * 8 + i, j] = X[row * 8 + i, j] * 2
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                Y[row * 8 + i, j] = X[I[row * 8 + i], j]

    _, tasks = persistent(gathered, small)
    assert [need.counter.arrivals.tolist() for need in tasks.needs] == [[8]]
    assert "waits for all 5 blocks with tasks of phase 0" in str(tasks)


def test_a_block_of_several_tasks_signals_once_where_later_ones_need_all(small: Machine):
    @T.prim_func
    def summed(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), Z: T.Tensor((2, 32), "float32")):
        with T.Kernel(16, threads=64) as row:
            for i, j in T.Parallel(4, 32):
                Y[row * 4 + i, j] = X[row * 4 + i, j] * 2
        with T.Kernel(2, threads=64) as column:
            total = T.alloc((32,), "float32", level="l0")
            T.clear(total)
            for row in T.serial(64):
                for j in T.Parallel(32):
                    total[j] += Y[row, j] * (column + 1)
            T.copy(total, Z[column, 0])

    kernel = tilescale.compile(summed, machine=small, schedule="persistent")
    (signal,) = [line for line in kernel.python.splitlines() if "T.signal" in line]
    (loop,) = [line for line in kernel.python.splitlines() if "for iteration in" in line]
    assert signal.index("T.signal") == loop.index("for iteration")
    x, _, z = ran(kernel.ir, [(64, 32), (2, 32)], 1, small, check="all")
    assert z.equal(torch.stack([2 * x.sum(0), 4 * x.sum(0)]))


def test_a_kernel_shows_its_tasks_and_can_be_called_again(small: Machine):
    kernel = tilescale.compile(halves, machine=small, schedule="persistent")
    assert kernel.moves is None
    assert "phase 1, grid 2 x 4" in kernel.schedule
    assert kernel.python.count("T.Kernel(") == 1
    x, y, z = torch.ones(64, 32), torch.zeros(64, 32), torch.zeros(64, 32)
    for factor in (1, 3):
        kernel(x.fill_(factor), y, z)
        assert z.eq(2 * factor + 1).all()


@T.prim_func
def barrier(X: T.Tensor((64, 32), "float32")):
    with T.Kernel(device=2, block=8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1
        with T.Scale("device"):
            T.barrier()


@T.prim_func
def loop(X: T.Tensor((64, 32), "float32"), N: T.Tensor((1,), "int32")):
    for _ in T.serial(N[0]):
        with T.Kernel(8, threads=64) as row:
            for i, j in T.Parallel(8, 32):
                X[row * 8 + i, j] = X[row * 8 + i, j] + 1


@T.prim_func
def threads(X: T.Tensor((64, 32), "float32")):
    with T.Kernel(8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1
    with T.Kernel(8, threads=128) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1


@T.prim_func
def signals(X: T.Tensor((64, 32), "float32"), F: T.Tensor((8,), "int32")):
    with T.Kernel(8, threads=64) as row:
        T.signal(F[row])
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1


@T.prim_func
def numbers(X: T.Tensor((64, 32), "float32")):
    with T.Kernel(device=2, block=8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = T.rank("block")


@T.prim_func
def chosen(X: T.Tensor((64, 32), "float32")):
    with T.Kernel(device=2, block=8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = X[row * 8 + i, j] * 2
        with T.Scale("device"):
            T.allreduce(X, impl="two_shot")


@T.prim_func
def workspaces(X: T.Tensor((64, 32), "float32")):
    with T.Kernel(device=2, block=8, threads=64) as row:
        W = T.alloc((64, 32), "float32", level="l2")
        for i, j in T.Parallel(8, 32):
            W[row * 8 + i, j] = X[row * 8 + i, j]
    with T.Kernel(device=2, block=4, threads=64) as row:
        W = T.alloc((64, 32), "float32", level="l2")
        for i, j in T.Parallel(16, 32):
            W[row * 16 + i, j] = X[row * 16 + i, j]


@pytest.mark.parametrize(
    ("func", "line", "reason"),
    [
        (workspaces, "block=4", "two workspaces are named 'W'"),
        (barrier, "T.barrier()", "a statement of the device between grids"),
        (loop, "for _ in T.serial(N[0])", "a loop or branch around phases"),
        (threads, "threads=128", "grids of 64 and of 128 threads"),
        (signals, "T.signal(F[row])", "the program orders its units by itself"),
        (chosen, 'T.allreduce(X, impl="two_shot")', "T.allreduce of whole tensors has no form of tiles"),
        (numbers, 'T.rank("block")', "a program uses its number"),
    ],
)
def test_a_program_that_is_not_fused_says_why(func: Any, line: str, reason: str, small: Machine):
    with pytest.raises(UnsupportedError, match=reason) as raised:
        tilescale.compile(func, machine=small, schedule="persistent")
    text = inspect.getsource(inspect.getmodule(test_a_program_that_is_not_fused_says_why)).splitlines()
    assert line in text[raised.value.where[0].line - 1]
