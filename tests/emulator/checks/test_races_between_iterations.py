# SPDX-License-Identifier: MIT
"""Iterations of one parallel loop that use each other's elements: races in any program, on device and shared memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import RaceError

N = 64


def run(body: Any, *, threads: int = N, x: torch.Tensor | None = None, scoped: bool = True) -> torch.Tensor:
    """The result of a macro of X, a tile in shared memory with the values of X, and Z."""

    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32")):
        if scoped:
            with T.Kernel(device=1, block=1, threads=threads), T.Scale("block"):
                t = T.alloc_shared((N,), "float32")
                T.copy(X, t)
                body(X, t, Z)
        else:
            with T.Kernel(1, threads=threads):
                t = T.alloc_shared((N,), "float32")
                T.copy(X, t)
                body(X, t, Z)

    z = torch.zeros(N)
    tilescale.emulate(program, [torch.arange(float(N)) if x is None else x, z], check="races")
    return z


@T.macro
def shifted_in_place(X, t, Z):
    for i in T.Parallel(N):
        t[i] = t[(i + 1) % N]


@T.macro
def shifted_where_even(X, t, Z):
    for i in T.Parallel(N):
        if i % 2 == 0:
            t[i] = t[(i + 1) % N]
    T.copy(t, Z)


@T.macro
def swapped_where_even(X, t, Z):
    for i in T.Parallel(N):
        if i % 2 == 0:
            Z[i] = t[i + 1]
            Z[i + 1] = t[i]


@T.macro
def summed_in_rows(X, t, Z):
    for i in T.Parallel(N // 8):
        for k in T.serial(8):
            Z[i * 8] = Z[i * 8] + t[i * 8 + k]


@T.macro
def summed_by_all(X, t, Z):
    for i in T.Parallel(N):
        Z[0] = Z[0] + t[i]


@T.macro
def shifted_again_and_again(X, t, Z):
    for _ in T.serial(3):
        for i in T.Parallel(N):
            Z[i] = t[(i + 1) % N]
        for i in T.Parallel(N):
            t[i] = Z[i]


@T.macro
def crosswise_in_shared_memory(X, t, Z):
    for i in T.Parallel(N):
        t[i] = X[i] + 1
        Z[i] = t[N - 1 - i]


@T.macro
def crosswise_in_device_memory(X, t, Z):
    for i in T.Parallel(N):
        Z[i] = t[i] + 1
        t[i] = Z[N - 1 - i]


@T.macro
def added_to_rows(X, t, Z):
    for i, j in T.Parallel(8, 8):
        t[i] = t[i] + X[8 * i + j]


@T.macro
def rows_backwards(X, t, Z):
    s = T.alloc_shared((8, 8), "float32")
    for i, j in T.Parallel(8, 8):
        s[i, j] = X[8 * i + j]
    for i, j in T.Parallel(8, 8):
        s[i, j] = s[i, 7 - j]


@T.macro
def one_stores_what_all_load(X, t, Z):
    for i in T.Parallel(N):
        Z[i] = t[0]
        if i == 5:
            t[0] = 1.0


@T.macro
def used_in_the_third_statement(X, t, Z):
    for i in T.Parallel(N):
        t[(i + 1) % N] = 0.0
        Z[i] = X[i]
        t[(i + 1) % N] = Z[N - 1 - i]


@T.macro
def one_element_for_all(X, t, Z):
    for i in T.Parallel(N - 1):
        t[i] = t[i] + t[N - 1]
        Z[i] = t[i]


@T.macro
def last_of_a_fragment(X, t, Z):
    f = T.alloc_fragment((8,), "float32")
    for i, j in T.Parallel(8, 8):
        f[i] = t[8 * i + j]
    T.copy(f, Z[0:8])


@T.macro
def added_and_stored(X, t, Z):
    for i in T.Parallel(N):
        T.atomic_add(Z[0], 1.0)
        Z[i] = t[i]


@T.macro
def stored_through_a_table(X, t, Z):
    for i in T.Parallel(N):
        Z[T.Cast("int32", X[i])] = T.Cast("float32", i)


@pytest.mark.parametrize("body", [shifted_in_place, summed_by_all, added_to_rows, rows_backwards])
@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("threads", [32, N, 2 * N])
def test_a_loop_that_loads_what_other_iterations_store_is_a_race(body: Any, scoped: bool, threads: int):
    with pytest.raises(RaceError, match=r"an iteration of device 0, block 0|a thread of device 0, block 0") as caught:
        run(body, threads=threads, scoped=scoped)
    assert "test_races_between_iterations.py" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (shifted_where_even, lambda x: torch.where(x % 2 == 0, x + 1, x)),
        (swapped_where_even, lambda x: torch.where(x % 2 == 0, x + 1, x - 1)),
        (summed_in_rows, lambda x: x.view(-1, 8).sum(1).repeat_interleave(8) * (x % 8 == 0)),
        (shifted_again_and_again, lambda x: x.roll(-3)),
    ],
)
@pytest.mark.parametrize("threads", [32, N])
def test_iterations_that_keep_apart_are_none(body: Any, want: Callable[[torch.Tensor], torch.Tensor], threads: int):
    assert torch.equal(run(body, threads=threads), want(torch.arange(float(N))))


def test_barriers_of_shared_memory_order_iterations_of_different_threads():
    assert torch.equal(run(crosswise_in_shared_memory), torch.arange(float(N)).flip(0) + 1)
    with pytest.raises(RaceError, match=r"^t\[0:64\] of device 0, block 0: an iteration .* writes it and .* reads it"):
        run(crosswise_in_shared_memory, threads=N // 2)


def test_nothing_orders_them_on_device_memory():
    with pytest.raises(RaceError, match=r"^Z\[0:64\] of device 0: an iteration .* writes it and .* reads it") as caught:
        run(crosswise_in_device_memory)
    lines = [where.line for where in caught.value.where]
    assert lines[1] == lines[0] + 1


def test_the_lines_are_those_of_the_two_accesses():
    with pytest.raises(RaceError, match=r"^Z\[0:64\]") as caught:
        run(used_in_the_third_statement, threads=N // 2)
    lines = [str(where).splitlines()[1].strip() for where in caught.value.where]
    assert lines == ["Z[i] = X[i]", "t[(i + 1) % N] = Z[N - 1 - i]"]


def test_one_iteration_may_not_store_what_all_load():
    with pytest.raises(RaceError, match=r"^t\[0\] .* reads it and another iteration writes it"):
        run(one_stores_what_all_load, threads=N // 2)


def test_many_may_load_one_element_and_fragments_are_judged_by_their_layout():
    assert run(one_element_for_all)[0] == N - 1
    assert torch.equal(run(last_of_a_fragment)[:8], torch.arange(7.0, N, 8))


def test_an_atomic_access_is_none_of_an_iteration():
    assert run(added_and_stored)[1] == 1


def test_what_is_stored_twice_depends_on_the_values():
    table = torch.arange(float(N)).flip(0)
    assert torch.equal(run(stored_through_a_table, x=table), table)
    with pytest.raises(RaceError, match=r"Z\[7\] .*writes it and another iteration writes it") as caught:
        run(stored_through_a_table, x=table.clamp(min=7))
    assert "T.atomic_add" in str(caught.value)


def test_one_nan_is_like_another():
    @T.macro
    def nothing(X, t, Z):
        for i in T.Parallel(N):
            Z[i // 2] = t[i] - t[i]

    assert run(nothing, x=torch.full((N,), torch.inf)).isnan().sum() == N // 2
