# SPDX-License-Identifier: MIT
"""Weights and caches that are loaded ahead across the tasks of one launch."""

import itertools
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.overlap.test_source import executed
from tests.persistent.conftest import FEW
from tilescale.hda import Machine
from tilescale.passes.persistent import ring
from tilescale.passes.persistent.rewrite import persistent

ROWS, INNER, DEPTH, HIGH = 16, 128, 64, 16


@T.macro
def multiply(W: Any, X: Any, Y: Any, column: Any) -> None:
    """Columns of Y = X W^T."""
    x = T.alloc((ROWS, INNER), "bfloat16", level="l1")
    w = T.alloc((HIGH, DEPTH), "bfloat16", level="l1")
    c = T.alloc((HIGH, ROWS), "float32", level="l0")
    T.copy(X, x)
    T.clear(c)
    for k in T.Pipelined(INNER // DEPTH, num_stages=2):
        T.copy(W[column * HIGH, k * DEPTH], w)
        T.gemm(w, x[:, k * DEPTH : (k + 1) * DEPTH], c, transpose_B=True)
    for i, j in T.Parallel(HIGH, ROWS):
        Y[j, column * HIGH + i] = c[i, j] * 0.125


@T.macro
def multiply_several(W: Any, X: Any, Y: Any, task: Any, count: int) -> None:
    """Several columns of Y = X W^T."""
    x = T.alloc((ROWS, INNER), "bfloat16", level="l1")
    w = T.alloc((HIGH, DEPTH), "bfloat16", level="l1")
    c = T.alloc((HIGH, ROWS), "float32", level="l0")
    T.copy(X, x)
    for tile in T.serial(count):
        T.clear(c)
        for k in T.Pipelined(INNER // DEPTH, num_stages=2):
            T.copy(W[(task * count + tile) * HIGH, k * DEPTH], w)
            T.gemm(w, x[:, k * DEPTH : (k + 1) * DEPTH], c, transpose_B=True)
        for i, j in T.Parallel(HIGH, ROWS):
            Y[j, (task * count + tile) * HIGH + i] = c[i, j] * 0.125


@T.prim_func
def twice(
    X: T.Tensor((ROWS, INNER), "bfloat16"),
    W: T.Tensor((INNER, INNER), "bfloat16"),
    V: T.Tensor((INNER, INNER), "bfloat16"),
    Y: T.Tensor((ROWS, INNER), "bfloat16"),
    Z: T.Tensor((ROWS, INNER), "bfloat16"),
):
    with T.Kernel(device=1, block=INNER // HIGH, threads=32) as column:
        multiply(W, X, Y, column)
    with T.Kernel(device=1, block=2, threads=32) as row:
        for i, j in T.Parallel(8, INNER):
            Y[row * 8 + i, j] = Y[row * 8 + i, j] + 1
    with T.Kernel(device=1, block=INNER // HIGH, threads=32) as column:
        multiply(V, Y, Z, column)


def arguments() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, INNER), (INNER, INNER), (INNER, INNER), (ROWS, INNER), (ROWS, INNER)]
    return [torch.randint(-3, 4, shape, generator=generator).bfloat16() for shape in shapes]


def test_weights_go_through_one_ring_and_bits_stay(small: Machine):
    kernel = tilescale.compile(twice, machine=small, schedule="persistent")
    want = arguments()
    tilescale.emulate(twice, [want], machine=small, time=False, check="none")
    for order in (None, 1):
        got = arguments()
        check = "none" if order else "all"
        tilescale.emulate(kernel.ir, [got], machine=small, time=False, schedule_seed=order, check=check)
        assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    assert "tma_copy" in kernel.schedule and "load -> compute: ring" in kernel.schedule


def test_loops_around_a_loop_of_loads_count_too(small: Machine, monkeypatch: pytest.MonkeyPatch):
    """All loads of a task with several columns go through the ring, which has fewer stages than that."""
    monkeypatch.setattr(ring, "MOST", 3)

    @T.prim_func
    def columns(
        X: T.Tensor((ROWS, INNER), "bfloat16"),
        W: T.Tensor((INNER, INNER), "bfloat16"),
        V: T.Tensor((INNER, INNER), "bfloat16"),
        Y: T.Tensor((ROWS, INNER), "bfloat16"),
        Z: T.Tensor((ROWS, INNER), "bfloat16"),
    ):
        with T.Kernel(device=1, block=INNER // HIGH // 4, threads=32) as task:
            multiply_several(W, X, Y, task, 4)
        with T.Kernel(device=1, block=INNER // HIGH // 2, threads=32) as task:
            multiply_several(V, Y, Z, task, 2)

    kernel = tilescale.compile(columns, machine=small, schedule="persistent")
    assert "num_stages" not in kernel.python and kernel.python.count("% 3], load") == 2
    want, got = arguments(), arguments()
    tilescale.emulate(columns, [want], machine=small, time=False, check="none")
    tilescale.emulate(kernel.ir, [got], machine=small, time=False, check="all")
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_a_load_waits_until_few_are_in_flight(small: Machine, monkeypatch: pytest.MonkeyPatch):
    want = arguments()
    tilescale.emulate(twice, [want], machine=small, time=False, check="none")
    waits = []
    for in_flight in 1 << 20, 1:
        monkeypatch.setattr(ring, "IN_FLIGHT", in_flight)
        kernel = tilescale.compile(twice, machine=small, schedule="persistent")
        waits.append(kernel.python.count("T.mbarrier_wait_parity"))
        got = arguments()
        tilescale.emulate(kernel.ir, [got], machine=small, time=False, check="all")
        assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    assert waits[0] == 2 < waits[1], "uses of stages wait, and then loads too"
    _, first, others = kernel.python.split("for load", 2)
    assert "tma_copy(V" not in first and "tma_copy(V" in others, "no block gets so far: TileLang refuses dead copies"


def test_fewer_loads_of_a_later_phase_are_in_flight(small: Machine, monkeypatch: pytest.MonkeyPatch):
    """Those that a task of the first phase issues for the second one wait; those of its own phase do not."""
    monkeypatch.setattr(ring, "IN_FLIGHT", 1 << 20)
    monkeypatch.setattr(ring, "AHEAD", 1)
    monkeypatch.setattr(ring, "MOST", 3)
    want, got = arguments(), arguments()
    tilescale.emulate(twice, [want], machine=small, time=False, check="none")
    kernel = tilescale.compile(twice, machine=small, schedule="persistent")
    lines = [line.strip() for line in kernel.python.splitlines()]
    paced = [after[:12] for line, after in itertools.pairwise(lines) if "mbarrier_wait" in line and "tma_copy" in after]
    assert paced == ["T.tma_copy(V"]
    tilescale.emulate(kernel.ir, [got], machine=small, time=False, check="all")
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_a_loop_of_phases_with_and_without_loads_goes_through_the_ring(small: Machine):
    """One phase in the loop has loads, and so has one behind it."""

    @T.prim_func
    def looped(
        X: T.Tensor((ROWS, INNER), "bfloat16"),
        W: T.Tensor((INNER, INNER), "bfloat16"),
        V: T.Tensor((INNER, INNER), "bfloat16"),
        Y: T.Tensor((ROWS, INNER), "bfloat16"),
        Z: T.Tensor((ROWS, INNER), "bfloat16"),
    ):
        for _ in T.serial(2):
            with T.Kernel(device=1, block=INNER // HIGH, threads=32) as column:
                multiply(W, X, Y, column)
            with T.Kernel(device=1, block=2, threads=32) as row:
                for i, j in T.Parallel(8, INNER):
                    X[row * 8 + i, j] = Y[row * 8 + i, j] + 1
        with T.Kernel(device=1, block=INNER // HIGH, threads=32) as column:
            multiply(V, Y, Z, column)

    assert rings(looped, small) == 1
    want, got = arguments(), arguments()
    tilescale.emulate(looped, [want], machine=small, time=False, check="none")
    tilescale.emulate(persistent(looped, small)[0], [got], machine=small, time=False, check="all")
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_the_text_with_a_ring_is_the_program(small: Machine):
    again = executed(tilescale.compile(twice, machine=small, schedule="persistent").python, "twice")
    want, got = arguments(), arguments()
    tilescale.emulate(twice, [want], machine=small, time=False, check="none")
    tilescale.emulate(again, [got], machine=small, time=False, check="none")
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_what_phases_write_is_not_loaded_ahead(small: Machine):
    @T.prim_func
    def written(W: T.Tensor((INNER, INNER), "bfloat16"), X: T.Tensor((ROWS, INNER), "bfloat16")):
        with T.Kernel(device=1, block=8, threads=32) as row:
            for i, j in T.Parallel(16, INNER):
                W[row * 16 + i, j] = W[row * 16 + i, j] + 1
        with T.Kernel(device=1, block=INNER // HIGH, threads=32) as column:
            multiply(W, X, W, column)

    assert not rings(written, small)


@T.prim_func
def both(
    X: T.Tensor((ROWS, INNER), "bfloat16"),
    W: T.Tensor((INNER, INNER), "bfloat16"),
    V: T.Tensor((INNER, INNER), "bfloat16"),
    Y: T.Tensor((ROWS, INNER), "bfloat16"),
):
    with T.Kernel(device=1, block=FEW, threads=32) as column:
        x = T.alloc((ROWS, INNER), "bfloat16", level="l1")
        w, v = (T.alloc((HIGH, DEPTH), "bfloat16", level="l1") for _ in range(2))
        c = T.alloc((HIGH, ROWS), "float32", level="l0")
        T.copy(X, x)
        T.clear(c)
        for k in T.Pipelined(INNER // DEPTH, num_stages=2):
            T.copy(W[column * HIGH, k * DEPTH], w)
            T.copy(V[column * HIGH, k * DEPTH], v)
            T.gemm(w, x[:, k * DEPTH : (k + 1) * DEPTH], c, transpose_B=True)
            T.gemm(v, x[:, k * DEPTH : (k + 1) * DEPTH], c, transpose_B=True)
        for i, j in T.Parallel(HIGH, ROWS):
            Y[j, column * HIGH + i] = c[i, j] * 0.125
    with T.Kernel(device=1, block=2, threads=32) as row:
        for i, j in T.Parallel(8, INNER):
            Y[row * 8 + i, j] = Y[row * 8 + i, j] + 1


@pytest.mark.parametrize(("most", "seconds"), [(3, 2), (4, 1)])
def test_loads_of_one_loop_follow_one_another(
    most: int, seconds: int, small: Machine, monkeypatch: pytest.MonkeyPatch
):
    """With a stage too few the last one, of the second tensor, is issued when the first stage is free."""
    monkeypatch.setattr(ring, "MOST", most)
    kernel = tilescale.compile(both, machine=small, schedule="persistent")
    assert [kernel.python.count(f"tma_copy({name}") for name in "WV"] == [1, seconds]
    want, got = arguments()[:4], arguments()[:4]
    tilescale.emulate(both, [want], machine=small, time=False, check="none")
    tilescale.emulate(kernel.ir, [got], machine=small, time=False, check="all")
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_tiles_that_are_used_together_are_not_loaded_ahead(small: Machine):
    @T.prim_func
    def together(
        W: T.Tensor((INNER, INNER), "bfloat16"),
        V: T.Tensor((INNER, INNER), "bfloat16"),
        Y: T.Tensor((INNER, INNER), "bfloat16"),
    ):
        with T.Kernel(device=1, block=INNER // HIGH, threads=32) as row:
            w, v = (T.alloc((HIGH, DEPTH), "bfloat16", level="l1") for _ in range(2))
            for k in T.Pipelined(INNER // DEPTH, num_stages=2):
                T.copy(W[row * HIGH, k * DEPTH], w)
                T.copy(V[row * HIGH, k * DEPTH], v)
                for i, j in T.Parallel(HIGH, DEPTH):
                    Y[row * HIGH + i, k * DEPTH + j] = w[i, j] + v[i, j]

    assert not rings(together, small)


def cached(behind: bool = True, apart: bool = True, threads: int = 32) -> Any:
    """Iterations of two phases: the sums of the tiles of two caches, one after the other, to which tasks add a row.

    Args:
        behind: whether they add it behind their loads.
        apart: whether each iteration has caches of its own.
    """
    steps, high = 3, FEW * HIGH

    @T.prim_func
    def program(
        W: T.Tensor((high, INNER), "bfloat16"),
        K: T.Tensor((steps, high, INNER), "bfloat16"),
        V: T.Tensor((steps, high, INNER), "bfloat16"),
        Y: T.Tensor((high, DEPTH), "bfloat16"),
        Z: T.Tensor((high, DEPTH), "bfloat16"),
    ):
        for step in T.serial(steps):
            at = step if apart else 0
            with T.Kernel(device=1, block=FEW, threads=threads) as row:
                w = T.alloc((HIGH, DEPTH), "bfloat16", level="l1")
                c = T.alloc((HIGH, DEPTH), "bfloat16", level="l0")
                T.copy(Z[row * HIGH, 0], c)
                for k in T.Pipelined(INNER // DEPTH, num_stages=2):
                    T.copy(W[row * HIGH, k * DEPTH], w)
                    for i, j in T.Parallel(HIGH, DEPTH):
                        c[i, j] = (c[i, j] + w[i, j]) * 0.5
                T.copy(c, Y[row * HIGH, 0])
            with T.Kernel(device=1, block=FEW, threads=threads) as row:
                k, v = (T.alloc((HIGH, DEPTH), "bfloat16", level="l1") for _ in range(2))
                o = T.alloc((HIGH, DEPTH), "bfloat16", level="l0")
                T.copy(Y[row * HIGH, 0], o)
                if not behind:
                    for j in T.Parallel(INNER):
                        K[at, row * HIGH, j] = Y[row * HIGH, 0]
                for tile in T.Pipelined(INNER // DEPTH, num_stages=2):
                    T.copy(K[at, row * HIGH, tile * DEPTH], k)
                    for i, j in T.Parallel(HIGH, DEPTH):
                        o[i, j] = (o[i, j] + k[i, j]) * 0.5
                for tile in T.Pipelined(INNER // DEPTH, num_stages=2):
                    T.copy(V[at, row * HIGH, tile * DEPTH], v)
                    for i, j in T.Parallel(HIGH, DEPTH):
                        o[i, j] = (o[i, j] + v[i, j]) * 0.5
                T.copy(o, Z[row * HIGH, 0])
                if behind:
                    for j in T.Parallel(INNER):
                        K[at, row * HIGH, j] = Y[row * HIGH, 0]
                        V[at, row * HIGH, j] = Y[row * HIGH, 1]

    return program


def test_a_cache_is_loaded_before_its_task_adds_to_it(small: Machine, monkeypatch: pytest.MonkeyPatch):
    """Two loops of loads, one after the other; keys of the next step are loaded in the phase before."""
    monkeypatch.setattr(ring, "MOST", 3)
    func = cached()
    kernel = tilescale.compile(func, machine=small, schedule="persistent")
    before = kernel.python.split("T.signal(phase0")[0]
    assert "tma_copy(K[" in before and "tma_copy(V[" in before and "num_stages" not in kernel.python
    generator = torch.Generator().manual_seed(0)
    high = FEW * HIGH
    shapes = [(high, INNER), (3, high, INNER), (3, high, INNER), (high, DEPTH), (high, DEPTH)]
    given = [torch.randint(-3, 4, shape, generator=generator).bfloat16() for shape in shapes]
    want, got = ([x.clone() for x in given] for _ in range(2))
    tilescale.emulate(func, [want], machine=small, time=False, check="none")
    tilescale.emulate(kernel.ir, [got], machine=small, time=False, check="all")
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    assert "K_desc" in str(kernel.source), "by the warp that loads"


@pytest.mark.parametrize("changes", [{"behind": False}, {"apart": False}])
def test_what_a_task_has_written_before_is_not_loaded_ahead(changes: dict[str, bool], small: Machine):
    assert "tma_copy(K[" not in tilescale.compile(cached(**changes), machine=small, schedule="persistent").python


@pytest.mark.parametrize("threads", [128, 256])
def test_failures_of_waits_are_a_function_where_no_role_has_registers_of_its_own(threads: int, small: Machine):
    """Each phase has waits, and a copy of what follows a failed one would fill the instruction cache."""
    text = str(tilescale.compile(cached(threads=threads), machine=small, schedule="persistent").source)
    assert ("warpgroup_reg_alloc" in text) != text.startswith("#define TILESCALE_TASKS"), text[:200]


def rings(func: Any, machine: Machine) -> int:
    """Rings that are made for a program's weights."""
    with pytest.MonkeyPatch.context() as patch:
        made, make = [], ring.Ring.__init__
        patch.setattr(ring.Ring, "__init__", lambda *args: (made.append(args), make(*args))[1])
        persistent(func, machine)
    return len(made)
