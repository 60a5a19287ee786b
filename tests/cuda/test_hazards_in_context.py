# SPDX-License-Identifier: MIT
"""Accesses in loops, branches, units and pipelines: where a barrier is inserted, and where none is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.ordered_programs import PROGRAMS
from tests.cuda.support import bodies, source
from tests.cuda.test_hazards import by_a_copy, by_others, reversed_rows, said, script, text
from tests.cuda.test_stages import begun
from tilescale.backends.tilelang.lowering import hazards, stages

N, M = 256, 64

WHILE = ["before the store to X: threads synchronize (read)", "before the load of X: threads synchronize (stored)"]
"""The barriers between the condition of a `while` and its body, and between the body and the next condition."""


@T.prim_func
def pipelined_in_a_loop(X: T.Tensor((M, M), "float16"), Z: T.Tensor((M, M), "float32")):
    with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
        ws = T.alloc((3, M, M), "float16", level="l2")
        a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
        c = T.alloc((M, M), "float32", level="l0")
        T.clear(c)
        for step in T.serial(4):
            for k, i, j in T.Parallel(3, M, M):
                ws[k, i, j] = X[i, j] + T.Cast("float16", step)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(ws[k, 0:M, 0:M], a)
                T.copy(X, b)
                T.gemm(a, b, c)
        T.copy(c, Z)


def test_a_loop_loads_ahead_what_was_stored_before_it():
    assert "before the load of ws: threads synchronize, bulk copies are ordered (stored)" in said(pipelined_in_a_loop)
    assert "num_stages" in script(pipelined_in_a_loop)


@T.prim_func
def until_stored(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        while X[0] < 5:
            for i in T.Parallel(N):
                X[N - 1 - i] = X[N - 1 - i] + 1


def test_the_condition_of_a_while_is_ordered_with_its_body_in_each_iteration():
    assert said(until_stored) == WHILE
    assert script(until_stored).partition("while ")[2].count("tvm_storage_sync") == 2


@T.prim_func
def under_what_threads_load(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        mine = T.get_thread_binding()
        for i in T.Parallel(N):
            X[N - 1 - i] = Z[i]
        if X[mine] < 5:
            X[T.cast(Z[mine], "int32")] = 7


def test_a_thread_orders_its_condition_with_its_branch_by_itself():
    """A barrier in between would wait for threads that do not take the branch."""
    assert said(under_what_threads_load) == ["before the load of X: threads synchronize (stored)"]


def warpgroups_apart(first: int, second: int) -> Any:
    @T.prim_func
    def program(X: T.Tensor((128,), "float32"), Z: T.Tensor((128,), "float32")):
        with T.Kernel(device=2, block=1, threads=256), T.Scale("block"):
            ws, held = T.alloc((128,), "float32", level="l2"), T.alloc((128,), "float32", level="l0")
            with T.Scale("warpgroup") as (w, _):
                if w == first:
                    T.copy(ws, held)
            with T.Scale("warpgroup") as (w, _):
                if w == second:
                    for i in T.Parallel(128):
                        ws[127 - i] = X[i]
            with T.Scale("warpgroup") as (w, _):
                if w == first:
                    T.copy(held, Z)

    return program


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_statements_of_two_units_are_ordered_by_the_program(first: int, second: int):
    assert said(warpgroups_apart(first, second)) == []


@T.prim_func
def signalled_between(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        ws = T.alloc((N,), "float32", level="l2")
        flags = T.alloc_flags((1,))
        for i in T.Parallel(N):
            ws[i] = X[i]
        T.signal(flags[0])
        for i in T.Parallel(N):
            Z[i] = ws[N - 1 - i]


def test_threads_synchronize_for_a_signal():
    assert said(signalled_between) == []


@T.prim_func
def in_clusters(X: T.Tensor((4, N), "float32"), Z: T.Tensor((4, N), "float32")):
    with T.Kernel(cta_cluster=2, block=4, threads=N) as b, T.Scale("block"):
        for i in T.Parallel(N):
            X[b, i] = 1
        T.barrier()
        for i in T.Parallel(N):
            Z[b, i] = X[b, N - 1 - i]


def test_threads_synchronize_for_a_barrier_of_their_cluster():
    assert said(in_clusters) == []


@pytest.mark.parametrize(("statement", "ordered"), [(by_others, False), (by_a_copy, True)])
def test_a_producer_may_not_load_ahead_in_bulk_what_threads_store(statement: Any, ordered: bool):
    """Loads by threads stay where they are."""
    phase = stages.devices(begun(reversed_rows(statement)), None)
    assert hazards.lower(phase).ordered == ordered


@T.prim_func
def stored_by_all_and_by_one(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        Z[7] = 1.0
        for i in T.Parallel(N):
            Z[i] = X[i]


def test_a_thread_stores_after_the_store_of_all_threads():
    """One that is late would store the old value again."""
    assert said(stored_by_all_and_by_one) == ["before the store to Z: threads synchronize (stored)"]


def test_statements_of_few_threads_are_ordered_with_each_other():
    """Stock TileLang would have the second barrier inside of a branch."""
    assert said(PROGRAMS["loaded_by_few"]()) == ["before the store to tile: threads synchronize (stored)"] * 2


# -- in a loop ---------------------------------------------------------------------------------------------------------


def in_a_loop(body: Any) -> Any:
    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
        with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
            ws = T.alloc((N,), "float32", level="l2")
            for step in T.serial(4):
                body(step, X, ws, Z)

    return program


@T.macro
def until_larger(step, X, ws, Z):
    while X[0] < step:
        for i in T.Parallel(N):
            X[N - 1 - i] = X[N - 1 - i] + 1


@T.macro
def in_a_branch_of_some_threads(step, X, ws, Z):
    mine = T.get_thread_binding()
    for i in T.Parallel(N):
        ws[i] = X[i] + step
    if mine < 10:
        Z[mine] = ws[N - 1 - mine]


@T.macro
def in_a_loop_of_some_threads(step, X, ws, Z):
    mine = T.get_thread_binding()
    for i in T.Parallel(N):
        ws[i] = X[i] + step
    for _ in T.serial(mine % 2):
        Z[mine] = ws[N - 1 - mine]


BETWEEN = ["before the store to ws: threads synchronize (read)", "before the load of ws: threads synchronize (stored)"]
"""The barriers between iterations, and inside one."""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (until_larger, WHILE),
        (in_a_branch_of_some_threads, BETWEEN),
        (in_a_loop_of_some_threads, BETWEEN),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_statements_in_a_loop_are_ordered_as_those_outside(body: Any, expected: list[str]):
    assert said(in_a_loop(body)) == expected


@T.macro
def read_before_warpgroups(step, X, ws, Z):
    tile = T.alloc((N,), "float32", level="l1")
    for i in T.Parallel(N):
        tile[i] = X[i] + step
    for i in T.Parallel(N):
        Z[i] = tile[N - 1 - i]
    with T.Scale("warpgroup") as (w, _):
        for i in T.Parallel(N // 2):
            tile[w * (N // 2) + i] = X[i]
    T.copy(tile, ws)


def test_a_unit_waits_for_what_the_block_has_read_before_it():
    assert "before the store to tile: threads synchronize (read)" in said(in_a_loop(read_before_warpgroups))


@T.macro
def rows_that_memory_names(step, X, ws, Z):
    row, begin = T.cast(X[step], "int32"), step * 8
    for i in T.Parallel(4):
        ws[row * 32 + begin + i] = Z[i]
    for i in T.Parallel(4):
        Z[i] = ws[row * 32 + begin + 4 + i]


def test_an_index_that_an_iteration_reads_from_memory_is_another_one_in_the_next():
    assert said(in_a_loop(rows_that_memory_names)) == ["before the store to ws: threads synchronize (read)"]


def test_what_the_last_iteration_stored_is_ordered_with_a_load_after_the_loop():
    assert said(PROGRAMS["last_iteration"]()) == ["before the load of ws: threads synchronize (stored)"]


def test_a_barrier_in_a_branch_is_none_in_the_else_for_the_iteration_before():
    assert re.search(r"\} else \{\s+__syncthreads", text(PROGRAMS["read_in_an_else"]()))


@T.prim_func
def stored_in_an_else(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        tile = T.alloc((N,), "float32", level="l1")
        for _ in T.serial(3):
            for _ in T.serial(2):
                for i in T.Parallel(N):
                    tile[N - 1 - i] = X[i]
            for step in T.serial(2):
                if X[step] > 1:
                    for i in T.Parallel(N):
                        tile[i] = X[i] - tile[i]
                if X[step] > 0:
                    for i in T.Parallel(N):
                        tile[(i + 1) % N] = X[i]
                else:
                    for i in T.Parallel(N):
                        tile[(i + 7) % N] = 2 * X[i]


def test_an_access_is_another_one_in_each_iteration_of_each_of_its_loops():
    """The inner loops end between a store in one iteration of the outer loop and the same store in the next."""
    assert said(stored_in_an_else) == ["before the store to tile: threads synchronize (stored)"] * 3
    assert script(stored_in_an_else).count("tvm_storage_sync") == 4


# -- kinds of access ---------------------------------------------------------------------------------------------------


@T.prim_func
def there_and_back(X: T.Tensor((M, M), "float32"), Z: T.Tensor((M, M), "float32")):
    with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
        ws = T.alloc((M, M), "float32", level="l2")
        tile = T.alloc((M, M), "float32", level="l1")
        T.copy(X, tile)
        T.copy(tile, ws)
        T.copy(ws, tile)
        T.copy(tile, Z)


def test_a_bulk_load_is_ordered_after_a_store_that_may_be_of_threads():
    """TileLang decides whether a copy is one in bulk."""
    assert said(there_and_back) == [
        "before the load of ws: bulk stores are completed, threads synchronize, bulk copies are ordered (stored)"
    ]


@T.prim_func
def looked_at(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        tile = T.alloc((N,), "float32", level="l1")
        for i in T.Parallel(N):
            tile[i] = X[i]
        T.evaluate(T.lds128(tile[0:4]))
        for i in T.Parallel(N):
            tile[N - 1 - i] = X[i]
        T.copy(tile, Z)


def test_a_pointer_may_be_followed_to_a_part_of_a_tile():
    """Then stock TileLang orders the load alone, and not one store with the other."""
    assert said(looked_at) == ["before the store to tile: threads synchronize (stored)"]


@pytest.mark.parametrize("in_place", [True, False], ids=["the tile", "a later tile in its place"])
def test_what_a_bulk_copy_sends_is_read_before_threads_go_on_from_its_signal(in_place):
    """The thread that issues the copy completes it behind the barrier, while others may write there."""

    @T.prim_func
    def sent(X: T.Tensor((2, M, M), "float32"), Y: T.Tensor((M, M), "float32"), flag: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
            tile = T.alloc((M, M), "float32", level="l1")
            later = tile if in_place else T.alloc((M, M), "float32", level="l1")
            T.copy(X[0, 0, 0], tile)
            with T.Scale("device") as (rank, _):
                T.copy(tile, Y, dst=1 - rank, signal=flag[0], impl="tma")
            for i, j in T.Parallel(M, M):
                later[i, j] = 2 * X[1, i, j]
            for i, j in T.Parallel(M, M):
                X[0, i, j] = later[j, i]
            T.wait(flag[0], ">=", 1)

    made = bodies(source(sent))
    assert len(set(re.findall(r"buf_dyn_shmem \+ (\d+)", made))) <= 1, "tiles share memory"
    order = re.findall(r"tma_store(?:_wait<0, true>)?\(|__syncthreads\(|signal<", made)
    begin = order.index("tma_store(")
    assert order[begin : begin + 4] == ["tma_store(", "tma_store_wait<0, true>(", "__syncthreads(", "signal<"]
