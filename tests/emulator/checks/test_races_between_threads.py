# SPDX-License-Identifier: MIT
"""Races between threads of one block on device memory, in launches of plain TileLang."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import SEEDS, race

N = 256
ON_H200 = {"kind": "cuda", "arch": "sm_90a"}


def program(body: Any, size: int = N, threads: int | tuple[int, ...] = N) -> Any:
    """Two blocks that apply a macro to rows of two tensors."""

    @T.prim_func
    def made(X: T.Tensor((2, size), "float32"), W: T.Tensor((2, size), "float32"), at: T.Tensor((size,), "int32")):
        with T.Kernel(2, threads=threads) as b:
            body(X, W, at, b)

    return made


def given(size: int = N, at: Any = None) -> list[torch.Tensor]:
    return [torch.randn(2, size), torch.zeros(2, size), torch.arange(size, dtype=torch.int32) if at is None else at]


def is_silent(func: Any, args: list[torch.Tensor]) -> None:
    for seed in SEEDS:
        tilescale.emulate(func, [arg.clone() for arg in args], schedule_seed=seed)


# -- what is found -----------------------------------------------------------------------------------------------------


@T.macro
def reversed_row(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = 2 * X[b, i]  # row stored
    for i in T.Parallel(W.shape[1]):
        X[b, i] = W[b, W.shape[1] - 1 - i]  # row loaded


@T.macro
def shifted_row(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = 2 * X[b, i]  # shifted stored
    for i in T.Parallel(W.shape[1] - 1):
        X[b, i] = W[b, i + 1]  # shifted loaded


@T.macro
def transposed(X, W, at, b):
    for i, j in T.Parallel(16, W.shape[1] // 16):
        W[b, i * (W.shape[1] // 16) + j] = X[b, i * (W.shape[1] // 16) + j]  # matrix stored
    for i, j in T.Parallel(W.shape[1] // 16, 16):
        X[b, i * 16 + j] = W[b, j * (W.shape[1] // 16) + i]  # matrix loaded


@T.macro
def loaded_before(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = X[b, W.shape[1] - 1 - i]  # first loaded
    for i in T.Parallel(W.shape[1]):
        X[b, i] = 1.0  # then stored


@T.macro
def stored_twice(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = 1.0  # once stored
    for i in T.Parallel(W.shape[1]):
        W[b, W.shape[1] - 1 - i] = 2.0  # twice stored


@T.macro
def from_one_thread(X, W, at, b):
    if T.get_thread_binding() == 0:
        W[b, 0] = X[b, 0]  # one stored
    for i in T.Parallel(W.shape[1]):
        X[b, i] = W[b, 0]  # all loaded


@T.macro
def from_the_next_thread(X, W, at, b):
    t = T.get_thread_binding()
    W[b, t] = X[b, t]  # by thread stored
    X[b, t] = W[b, (t + 1) % 64]  # by thread loaded


@T.macro
def in_rounds(X, W, at, b):
    for _ in T.serial(2):
        for i in T.Parallel(W.shape[1]):
            W[b, i] = 2 * X[b, i]  # again stored
        T.sync_threads()
        for i in T.Parallel(W.shape[1]):
            X[b, i] = W[b, W.shape[1] - 1 - i]  # not done loading


@T.macro
def through_fragments(X, W, at, b):
    tile = T.alloc_fragment((W.shape[1] // 2,), "float32")
    T.copy(X[b, 0 : W.shape[1] // 2], tile)
    for i in T.Parallel(W.shape[1] // 2):
        tile[i] = 2 * tile[i]
    T.copy(tile, W[b, 0 : W.shape[1] // 2])  # tile stored
    for i in T.Parallel(W.shape[1] // 2):
        tile[i] = W[b, W.shape[1] // 2 - 1 - i]  # tile loaded
    T.copy(tile, X[b, 0 : W.shape[1] // 2])


@T.macro
def sums_of_a_product(X, W, at, b):
    left, right = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), "float16")
    sums = T.alloc_fragment((16, 16), "float32")
    T.clear(left)
    T.clear(right)
    T.gemm(left, right, sums, clear_accum=True)
    for i, j in T.Parallel(16, 16):
        W[b, i * 16 + j] = sums[i, j]  # sums stored
    for i, j in T.Parallel(16, 16):
        sums[i, j] = sums[i, j] + W[b, j * 16 + i]  # sums loaded


@T.macro
def sums_of_a_product_kept(X, W, at, b):
    left, right = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), "float16")
    sums = T.alloc_fragment((16, 16), "float32")
    T.clear(left)
    T.clear(right)
    T.gemm(left, right, sums, clear_accum=True)
    for i, j in T.Parallel(16, 16):
        W[b, i * 16 + j] = sums[i, j]
    for i, j in T.Parallel(16, 16):
        sums[i, j] = sums[i, j] + W[b, i * 16 + j]


@T.macro
def through_a_fragment_in_reverse(X, W, at, b):
    tile = T.alloc_fragment((128,), "float32")
    T.annotate_layout({tile: T.Fragment((128,), forward_thread_fn=lambda i: 127 - i)})
    for i in T.Parallel(128):
        W[b, i] = X[b, i]  # by threads in order
    for i in T.Parallel(128):
        tile[i] = W[b, i]  # by threads in reverse
    T.copy(tile, X[b, 0:128])


@T.macro
def from_shared_memory(X, W, at, b):
    tile = T.alloc_shared((W.shape[1],), "float32")
    for i in T.Parallel(W.shape[1]):
        tile[i] = 2 * X[b, i]
    T.copy(tile, W[b, 0 : W.shape[1]])  # copy stored
    for i in T.Parallel(W.shape[1]):
        X[b, i] = W[b, W.shape[1] - 1 - i]  # copy loaded


@T.macro
def to_shared_memory(X, W, at, b):
    tile = T.alloc_shared((W.shape[1],), "float32")
    for i in T.Parallel(W.shape[1]):
        W[b, W.shape[1] - 1 - i] = X[b, i]  # for the copy stored
    T.copy(W[b, 0 : W.shape[1]], tile)  # the copy loaded
    T.copy(tile, X[b, 0 : W.shape[1]])


@T.macro
def of_threads_along_two_axes(X, W, at, b):
    tx, ty = T.get_thread_binding(0), T.get_thread_binding(1)
    W[b, 32 * ty + tx] = X[b, 32 * ty + tx]  # by one row stored
    for i in T.Parallel(128):
        X[b, i] = W[b, i]  # by all rows loaded


@T.macro
def in_place_by_all_rows(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        X[b, i] = X[b, i] + 1  # in place


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("body", "size", "threads", "lines"),
    [
        (sums_of_a_product, N, 32, ("sums stored", "sums loaded")),
        (through_a_fragment_in_reverse, 128, 128, ("by threads in order", "by threads in reverse")),
        (from_shared_memory, N, N, ("copy stored", "copy loaded")),
        (from_shared_memory, 1024, 128, ("copy stored", "copy loaded")),
        (to_shared_memory, N, N, ("for the copy stored", "the copy loaded")),
        (to_shared_memory, 1000, 128, ("for the copy stored", "the copy loaded")),
        (from_shared_memory, N, (32, 4), ("copy stored", "copy loaded")),
        (reversed_row, N, (64, 2, 2), ("row stored", "row loaded")),
        (reversed_row, 1000, (32, 4), ("row stored", "row loaded")),
        (through_fragments, N, (64, 2), ("tile stored", "tile loaded")),
        (from_one_thread, N, (32, 8), ("one stored", "all loaded")),
        (of_threads_along_two_axes, 128, (32, 4), ("by one row stored", "by all rows loaded")),
        (reversed_row, N, N, ("row stored", "row loaded")),
        (reversed_row, 64, N, ("row stored", "row loaded")),  # the first threads
        (reversed_row, 1024, 128, ("row stored", "row loaded")),  # the one by vectors, the other by elements
        (reversed_row, 1000, 128, ("row stored", "row loaded")),
        (shifted_row, N, N, ("shifted stored", "shifted loaded")),
        (shifted_row, 1024, 128, ("shifted stored", "shifted loaded")),
        (transposed, N, N, ("matrix stored", "matrix loaded")),
        (loaded_before, N, N, ("first loaded", "then stored")),
        (stored_twice, N, N, ("once stored", "twice stored")),
        (from_one_thread, N, N, ("one stored", "all loaded")),
        (from_the_next_thread, 64, 64, ("by thread stored", "by thread loaded")),
        (in_rounds, N, N, ("again stored", "not done loading")),
        (through_fragments, N, 128, ("tile stored", "tile loaded")),
    ],
)
def test_two_accesses_by_different_threads(body: Any, size: int, threads: Any, lines: tuple[str, str], seed: Any):
    error = race(program(body, size, threads), given(size), *lines, seed=seed)
    assert "T.sync_threads() between line " in error.hint


def test_the_report_names_elements_lines_and_the_remedy():
    error = race(program(reversed_row), given(), "row stored", "row loaded")
    stored, loaded = (where.line for where in error.where)
    assert error.message.startswith("W[0, 0:256] of device 0: a thread of device 0, block 0 writes it and another")
    assert error.hint.startswith(f"T.sync_threads() between line {stored} and line {loaded}")
    assert "__syncthreads" not in tilescale.compile(program(reversed_row), target=ON_H200).source


@T.macro
def of_the_next_iteration(X, W, at, b):
    for i in T.Parallel(W.shape[1] - 1):
        X[b, i] = X[b, i + 1]  # in one loop


def test_iterations_of_one_loop():
    error = race(program(of_the_next_iteration), given(), "in one loop")
    assert (
        error.hint
        == f"in line {error.where[0].line}, load, T.sync_threads(), then store; or T.atomic_add, if threads add up"
    )


def test_threads_along_y_repeat_an_update():
    race(program(in_place_by_all_rows, threads=(64, 4)), given(), "in place")
    is_silent(program(in_place_by_all_rows), given())


@T.macro
def at_places_in_memory(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = X[b, i]  # anywhere stored
    for i in T.Parallel(W.shape[1]):
        if i < at[0]:
            X[b, i] = W[b, at[i]]  # anywhere loaded


def test_indices_and_conditions_count_as_the_run_has_them():
    same, other = torch.arange(N, dtype=torch.int32), torch.arange(N, dtype=torch.int32).flip(0)
    race(program(at_places_in_memory), given(at=other), "anywhere stored", "anywhere loaded")
    other[0] = 0  # no iteration loads
    is_silent(program(at_places_in_memory), given(at=other))
    same[0] = N - 1
    same[N - 1] = 0
    race(program(at_places_in_memory), given(at=same), "anywhere stored", "anywhere loaded")


# -- correct programs
# ----------------------------------------------------------------------------------------------------


@T.macro
def with_a_barrier(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = X[b, i]
    T.sync_threads()
    for i in T.Parallel(W.shape[1]):
        X[b, i] = W[b, W.shape[1] - 1 - i]


@T.macro
def with_a_vote(X, W, at, b):
    t = T.get_thread_binding()
    W[b, t] = X[b, t]
    if T.syncthreads_count(X[b, t] > 0) >= 0:
        X[b, t] = W[b, N - 1 - t]


@T.macro
def of_the_same_thread(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = X[b, i]
    for i in T.Parallel(W.shape[1]):
        X[b, i] = W[b, i] + X[b, i]
    for i in T.Parallel(W.shape[1]):
        if i % 3 == 0:
            W[b, i] = X[b, i]


@T.macro
def of_one_iteration_inside(X, W, at, b):
    for i in T.Parallel(W.shape[1]):
        W[b, i] = X[b, i + W.shape[1] - 1]
    if T.get_thread_binding() == 0:
        X[b, W.shape[1] - 1] = 1.0


@T.macro
def of_the_same_value_for_all(X, W, at, b):
    W[b, 0] = 1.0
    for i in T.Parallel(W.shape[1]):
        X[b, i] = W[b, 0]


@T.macro
def through_shared_memory(X, W, at, b):
    tile = T.alloc_shared((N,), "float32")
    t = T.get_thread_binding()
    W[b, t] = X[b, t]
    tile[t] = X[b, t]
    X[b, t] = tile[N - 1 - t]
    X[b, t] = X[b, t] + W[b, N - 1 - t]


@T.macro
def through_a_fragment_of_given_layout(X, W, at, b):
    tile = T.alloc_fragment((128,), "float32")
    T.annotate_layout({tile: T.Fragment((128,), forward_thread_fn=lambda i: 127 - i)})
    for i in T.Parallel(128):
        W[b, i] = X[b, i]
    for i in T.Parallel(128):
        tile[i] = W[b, 127 - i]
    for i in T.Parallel(128):
        X[b, 127 - i] = tile[i]


@T.macro
def to_shared_memory_by_the_same_threads(X, W, at, b):
    tile = T.alloc_shared((W.shape[1],), "float32")
    for i in T.Parallel(W.shape[1]):
        W[b, i] = X[b, i]
    T.copy(W[b, 0 : W.shape[1]], tile)
    T.copy(tile, X[b, 0 : W.shape[1]])


@T.macro
def stored_once_the_tile_is_there(X, W, at, b):
    tile = T.alloc_shared((W.shape[1],), "float32")
    T.copy(X[b, 0 : W.shape[1]], tile)
    for i in T.Parallel(W.shape[1]):
        X[b, i] = tile[W.shape[1] - 1 - i]


@T.macro
def into_a_tile_in_use(X, W, at, b):
    tile = T.alloc_shared((W.shape[1],), "float32")
    T.copy(X[b, 0 : W.shape[1]], tile)
    for i in T.Parallel(W.shape[1]):
        W[b, W.shape[1] - 1 - i] = tile[W.shape[1] - 1 - i]
    T.copy(W[b, 0 : W.shape[1]], tile)  # after a barrier: other threads loaded the tile
    T.copy(tile, X[b, 0 : W.shape[1]])


@T.macro
def stored_by_all_rows(X, W, at, b):
    half = W.shape[1] // 2
    for i in T.Parallel(half):
        W[b, i] = X[b, i]
    for i in T.Parallel(half):
        W[b, half + i] = W[b, i]


@pytest.mark.parametrize(
    ("body", "size", "threads"),
    [
        (to_shared_memory_by_the_same_threads, N, N),
        (stored_once_the_tile_is_there, N, N),
        (into_a_tile_in_use, N, N),
        (stored_by_all_rows, N, (64, 2)),
        (of_the_same_value_for_all, N, (64, 4)),
        (with_a_barrier, N, N),
        (with_a_vote, N, N),
        (of_the_same_thread, N, N),
        (of_the_same_thread, 1024, 128),  # only TileLang knows whether they are distributed alike
        (of_the_same_value_for_all, N, N),
        (of_one_iteration_inside, N, N),
        (through_shared_memory, N, N),
        (sums_of_a_product_kept, N, 32),
        (through_a_fragment_of_given_layout, 128, 128),
        (reversed_row, N, 1),
    ],
)
def test_what_is_ordered_or_unknown_is_silent(body: Any, size: int, threads: Any):
    is_silent(program(body, size, threads), given(size))


def test_tilelang_inserts_the_barrier_for_shared_memory_that_is_counted_on():
    text = tilescale.compile(program(through_shared_memory), target=ON_H200).source
    assert text.index("W[") < text.index("__syncthreads()") < text.rindex("W[")


def test_launches_with_constructs_of_tilescale_get_their_barriers():
    @T.prim_func
    def func(X: T.Tensor((N,), "float32"), W: T.Tensor((N,), "float32")):
        with T.Kernel(device=1, block=1, threads=N), T.Scale("block"):
            for i in T.Parallel(N):
                W[i] = X[i]
            for i in T.Parallel(N):
                X[i] = W[N - 1 - i]

    is_silent(func, [torch.randn(N), torch.zeros(N)])


def test_a_program_without_races_checked_is_not_stopped():
    for check in ("none", "uninitialized"):
        tilescale.emulate(program(reversed_row), given(), check=check)
