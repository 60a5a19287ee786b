# SPDX-License-Identifier: MIT
"""Thread-private accesses: no barrier separates these, and one separates all others."""

from importlib import import_module
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.support import example_programs, lowered, source
from tilescale.hda.current import use_machine
from tilescale.ops.gemm_tiles import TILINGS, GemmSpec

N, M = 256, 64
FEW = (N,), N
"""A tensor of an element for each thread, and the threads."""
MANY = (4 * N,), N
"""A tensor of a vector for each thread."""
RAGGED = (1000,), 128
"""A tensor of whole vectors that some threads have one less of."""
SQUARE = (M, M), 128


def synchronizes(func: Any) -> bool:
    """Whether a barrier was inserted."""
    return any(note.startswith("before ") for note in lowered(func).notes)


def program(shape: tuple[int, ...], threads: int, body: Any) -> Any:
    """A program of one block that applies a macro to two tensors of a shape, and numbers."""

    @T.prim_func
    def made(X: T.Tensor(shape, "float32"), Z: T.Tensor(shape, "float32"), at: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(device=2, block=1, threads=threads), T.Scale("block"):
            body(X, Z, at, n)

    return made


@T.macro
def stored_and_loaded(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = Z[i]


@T.macro
def loaded_under_a_condition(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        if i % 5 == 3:
            X[i] = Z[i]


@T.macro
def chosen_by_the_index(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = T.if_then_else(i % 3 == 0, Z[i], 0.0)


@T.macro
def of_another_index(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = Z[Z.shape[0] - 1 - i]


@T.macro
def with_another_tensor(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = T.cast(at[i % 8], "float32") + Z[i]


@T.macro
def shared_by_two(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i // 2]
    for i in T.Parallel(Z.shape[0]):
        X[i // 2] = Z[i]


@T.macro
def sliding(X, Z, at, n):
    for turn in T.serial(8):
        for i in T.Parallel(N - 8):
            Z[turn + i] = Z[turn + i] + 1


@T.macro
def found_in_memory(X, Z, at, n):
    for turn in T.serial(8):
        for i in T.Parallel(N - 8):
            Z[at[turn] + i] = Z[at[turn] + i] + 1


@T.macro
def by_warpgroups(X, Z, at, n):
    for i in T.Parallel(N // 2):
        Z[i] = X[i]
    with T.Scale("warpgroup") as (w, _):
        for i in T.Parallel(N // 2):
            X[w * (N // 2) + i] = Z[i]


@T.macro
def turned(X, Z, at, n):
    for i, j in T.Parallel(M, M):
        Z[i, j] = X[i, j]
    for i, j in T.Parallel(M, M):
        X[i, j] = Z[i, j]
    for i, j in T.Parallel(M, M):
        Z[i, j] = X[j, i]


@T.macro
def same_rows_in_turns(X, Z, at, n):
    for turn in T.serial(8):
        for j in T.Parallel(M):
            Z[turn % 2, j] = Z[turn % 2, j] + 1


@T.macro
def flat(X, Z, at, n):
    for i, j in T.Parallel(16, 16):
        Z[i * 16 + j] = X[i * 16 + j]
    for i, j in T.Parallel(16, 16):
        X[i * 16 + j] = Z[i * 16 + j]


@T.macro
def overlapping_rows(X, Z, at, n):
    for i, j in T.Parallel(16, 16):
        Z[i * 8 + j] = X[i * 8 + j]
    for i, j in T.Parallel(16, 16):
        X[i * 8 + j] = Z[i * 8 + j]


@T.macro
def of_the_next_thread(X, Z, at, n):
    with T.Scale("thread") as (t, _):
        Z[t] = X[t]
        if t < N - 1:
            X[t] = Z[t + 1]


@T.macro
def of_the_thread_itself(X, Z, at, n):
    with T.Scale("thread") as (t, _):
        Z[t] = X[t]
        X[t] = Z[t]


@T.macro
def sliding_by_threads(X, Z, at, n):
    with T.Scale("thread") as (t, _):
        for turn in T.serial(8):
            if t < N - 8:
                Z[turn + t] = Z[turn + t] + 1


@T.macro
def stored_and_updated(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        Z[i] = Z[i] + 1


@T.macro
def unaligned(X, Z, at, n):
    for i in T.Parallel(Z.shape[0] - N):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0] - N):
        X[i + 1] = Z[i]


@T.macro
def with_the_index_as_a_value(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = Z[i] + i


@T.macro
def with_a_function(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = T.exp(Z[i])


@T.macro
def with_a_cast(X, Z, at, n):
    for i in T.Parallel(Z.shape[0]):
        Z[i] = X[i]
    for i in T.Parallel(Z.shape[0]):
        X[i] = T.cast(T.cast(Z[i], "float16"), "float32")


@T.macro
def with_a_loop_of_one(X, Z, at, n):
    for i, j in T.Parallel(1, N):
        Z[i * 16 + j] = X[i * 16 + j]
    for i, j in T.Parallel(1, N):
        X[i * 16 + j] = Z[i * 16 + j]


@T.macro
def in_a_row_of_threads(X, Z, at, n):
    thread = T.get_thread_binding()
    if thread < M:
        Z[n, thread] = X[n, thread]
        X[n, thread] = Z[n, thread]


@T.macro
def by_two_threads(X, Z, at, n):
    thread = T.get_thread_binding()
    X[thread] = Z[thread // 2]
    if thread % 2 == 0:
        Z[thread // 2] = 1.0


@T.macro
def at_an_index_in_memory(X, Z, at, n):
    thread = T.get_thread_binding()
    for turn in T.serial(8):
        if thread < N - 8:
            Z[at[0] + thread] = X[thread]
        if thread == n:
            at[0] = turn
        if thread < N - 8:
            X[thread] = Z[at[0] + thread]


@pytest.mark.parametrize(
    ("body", "on", "needs"),
    [
        (stored_and_loaded, FEW, False),
        (stored_and_loaded, MANY, False),
        (stored_and_updated, MANY, False),
        (unaligned, MANY, True),
        (with_the_index_as_a_value, MANY, True),
        (with_a_function, MANY, True),
        (with_a_cast, MANY, True),
        (with_a_loop_of_one, FEW, False),
        (in_a_row_of_threads, SQUARE, False),
        (by_two_threads, FEW, True),
        (at_an_index_in_memory, FEW, True),
        (loaded_under_a_condition, FEW, False),  # an iteration for each thread, in any form
        (loaded_under_a_condition, MANY, True),  # the one by vectors, the other by elements
        (chosen_by_the_index, FEW, False),
        (chosen_by_the_index, MANY, True),
        (with_another_tensor, FEW, False),
        (with_another_tensor, MANY, True),
        (stored_and_loaded, RAGGED, False),
        (loaded_under_a_condition, RAGGED, True),
        (with_another_tensor, RAGGED, True),
        (of_another_index, FEW, True),
        (shared_by_two, FEW, True),
        (sliding, FEW, True),
        (found_in_memory, FEW, True),
        (by_warpgroups, FEW, True),
        (of_the_next_thread, FEW, True),
        (of_the_thread_itself, FEW, False),
        (sliding_by_threads, FEW, True),
        (flat, FEW, False),
        (overlapping_rows, FEW, True),
        (turned, SQUARE, True),
        (same_rows_in_turns, SQUARE, False),
    ],
)
def test_loops_that_are_distributed_alike_need_no_barrier(body: Any, on: tuple[Any, int], needs: bool):
    assert synchronizes(program(*on, body)) == needs


def test_tilelang_distributes_by_vectors_what_loops_touch_alike():
    """Assumption of the map of loops: whole vectors only where neither a condition nor a value uses the iteration."""
    text = source(program(*MANY, loaded_under_a_condition))
    assert "*(float4*)(Z + (((int)threadIdx.x) * 4)) =" in text
    assert "X[((i * 256) + ((int)threadIdx.x))] = Z[((i * 256) + ((int)threadIdx.x))]" in text
    assert text.index("float4") < text.index("__syncthreads") < text.index("% 5")


@pytest.mark.parametrize("name", ["05_all_to_all", "10_cluster_gemm", "16_cannon", "17_summa"])
def test_examples_have_no_barrier_that_they_do_not_need(name: str):
    with use_machine("h200-sxm-8"):
        for func in example_programs()[name]():
            assert not synchronizes(func)


GEMM = GemmSpec(8192, 4096, "bfloat16", TILINGS[0], True, False)
OPERATORS: dict[str, tuple[Any, ...]] = {
    "ag_gemm": (2, GEMM),
    "gemm_rs": (2, GEMM),
    "gemm_ar": (2, GEMM, 132),
    "ag_columns_gemm": (2, GEMM),
    "grouped_gemm": (0, 4096, 4096, "bfloat16", True, 132),
    "sequence_attention": (2, 1, 16, 4, 128, "bfloat16", True, True, True, 0.1),
    "attention_backward": (2, 1, 16, 4, 128, "bfloat16", True, True, True, 0.1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_no_time_for_barriers(name: str):
    """So their text, and their time, is what it is without the insertion."""
    with use_machine("h200-sxm-8"):
        assert not synchronizes(import_module(f"tilescale.ops.{name}").program(*OPERATORS[name]))
