# SPDX-License-Identifier: MIT
"""Accesses in loops, branches, units and pipelines: where a barrier is inserted, and where none is needed."""

from __future__ import annotations

import tilescale.language as T
from tests.cuda.test_hazards import said, script

N, M = 256, 64


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
    assert said(until_stored) == [
        "before the store to X: threads synchronize (read)",
        "before the load of X: threads synchronize (stored)",
    ]
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


@T.prim_func
def warpgroups_apart(X: T.Tensor((128,), "float32"), Z: T.Tensor((128,), "float32")):
    with T.Kernel(device=2, block=1, threads=256), T.Scale("block"):
        ws = T.alloc((128,), "float32", level="l2")
        with T.Scale("warpgroup") as (w, _):
            if w == 1:
                for i in T.Parallel(128):
                    ws[i] = X[i]
            if w == 0:
                for i in T.Parallel(128):
                    Z[i] = ws[127 - i]


def test_statements_of_two_units_are_ordered_by_the_program():
    assert said(warpgroups_apart) == []


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
