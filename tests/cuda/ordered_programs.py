# SPDX-License-Identifier: MIT
"""Programs whose threads load, or store again, what other threads of their unit stored to device or shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilescale.language as T

N, M, STEPS = 256, 64, 6


def program(threads: int, shape: tuple[int, ...], body: Any, dtype: str = "float32") -> Any:
    """A program of one block that applies a macro to X, a workspace of its shape and Z."""

    @T.prim_func
    def ordered(X: T.Tensor(shape, dtype), Z: T.Tensor(shape, "float32")):
        with T.Kernel(device=T.ALL, block=1, threads=threads), T.Scale("block"):
            ws = T.alloc(shape, dtype, level="l2")
            body(X, ws, Z)

    return ordered


@T.macro
def reversed_row(X, ws, Z):
    for i in T.Parallel(N):
        ws[i] = 2 * X[i]
    for i in T.Parallel(N):
        Z[i] = ws[N - 1 - i]


@T.macro
def stencil(X, ws, Z):
    for i, j in T.Parallel(M, M):
        ws[i, j] = 2 * X[i, j]
    for i, j in T.Parallel(M, M):
        Z[i, j] = ws[T.max(i - 1, 0), j] + ws[T.min(i + 1, M - 1), j]


@T.macro
def layouts(X, ws, Z):
    a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
    c = T.alloc((M, M), "float32", level="l0")
    T.copy(X, a)
    for i, j in T.Parallel(M, M):
        b[i, j] = T.Cast("float16", T.if_then_else(i == j, 1.0, 0.0))
    T.clear(c)
    T.gemm(a, b, c)
    T.copy(c, ws)
    for i, j in T.Parallel(M, M):
        Z[i, j] = ws[j, i]


@T.macro
def bulk_store(X, ws, Z):
    tile = T.alloc((M, M), "float32", level="l1")
    T.copy(X, tile)
    T.copy(tile, ws)
    for i, j in T.Parallel(M, M):
        Z[i, j] = ws[j, i]


@T.macro
def bulk_stores(X, ws, Z):
    tile = T.alloc((M, M), "float32", level="l1")
    for step in T.serial(STEPS):
        for i, j in T.Parallel(M, M):
            tile[i, j] = X[i, j] + step
        T.copy(tile, ws)
    T.copy(ws, tile)
    T.copy(tile, Z)


@T.macro
def loaded_ahead(X, ws, Z):
    a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
    c = T.alloc((M, M), "float32", level="l0")
    for i, j in T.Parallel(M, M):
        ws[i, j] = X[j, i]
    T.clear(c)
    for _ in T.Pipelined(STEPS, num_stages=3):
        T.copy(ws, a)
        T.copy(X, b)
        T.gemm(a, b, c)
    T.copy(c, Z)


@T.macro
def turns(X, ws, Z):
    T.copy(X, ws)
    for _ in T.serial(STEPS):
        for i in T.Parallel(N):
            Z[i] = ws[N - 1 - i] + 1
        for i in T.Parallel(N):
            ws[i] = Z[(i + 40) % N]
    T.copy(ws, Z)


@T.macro
def warpgroups(X, ws, Z):
    with T.Scale("warpgroup") as (w, _):
        for i in T.Parallel(N // 2):
            ws[w * 128 + i] = 2 * X[w * 128 + i]
        for i in T.Parallel(N // 2):
            Z[w * 128 + i] = ws[w * 128 + 127 - i]
    for i in T.Parallel(N):
        ws[i] = Z[N - 1 - i]
    for i in T.Parallel(N):
        Z[i] = ws[(i + 7) % N]


@T.macro
def updates(X, ws, Z):
    ws[0] = X[0]
    for _ in T.serial(STEPS):
        ws[0] = ws[0] + 1
    for i in T.Parallel(N):
        Z[i] = ws[0] + i


@T.macro
def stored_again(X, ws, Z):
    tile = T.alloc((N,), "float32", level="l1")
    T.copy(X, tile)
    for step in T.serial(STEPS):
        for i in T.Parallel(N):
            tile[(i + 77) % N] = X[i] + step
        for i in T.Parallel(N):
            if i % 3 == 0:
                tile[N - 1 - i] = X[i] * step
    T.copy(tile, Z)


@T.macro
def vectors_and_elements(X, ws, Z):
    for i in T.Parallel(4 * N):
        ws[i] = X[i]
    for i in T.Parallel(4 * N):
        Z[i] = T.if_then_else(i % 3 == 0, ws[i], X[i] + 1)
    for i in T.Parallel(4 * N):
        if i % 5 != 3:
            ws[i] = Z[i] * 2
    T.copy(ws, Z)


@T.macro
def sliding(X, ws, Z):
    T.copy(X, ws)
    for step in T.serial(STEPS):
        for i in T.Parallel(N - STEPS):
            ws[step + i] = ws[step + i] + X[i]
    T.copy(ws, Z)


@T.macro
def loaded_by_two(X, ws, Z):
    T.copy(X, ws)
    for step in T.serial(STEPS):
        for i in T.Parallel(N):
            Z[i] = ws[i // 2] + step
        for i in T.Parallel(N):
            if i % 2 == 0:
                ws[i // 2] = Z[i] + 1


@T.macro
def of_other_threads(X, ws, Z):
    for step in T.serial(STEPS):
        for i in T.Parallel(N // 2):
            ws[i] = X[i] + step
        with T.Scale("warpgroup") as (w, _):
            for i in T.Parallel(N // 2):
                Z[w * (N // 2) + i] = ws[i] + w


@T.macro
def next_threads(X, ws, Z):
    T.copy(X, ws)
    with T.Scale("thread") as (t, _):
        for step in T.serial(STEPS):
            if t < N - 1:
                Z[t] = ws[t + 1] + step
            if t < N - 1:
                ws[t] = Z[t]
    T.copy(ws, Z)


@T.macro
def by_a_warp(X, ws, Z):
    """The threads of one warp store an element that all load."""
    thread = T.get_thread_binding()
    for step in T.serial(STEPS):
        if thread // 32 == step:
            ws[step] = X[step] + step
        for i in T.Parallel(N):
            Z[i] = ws[step] + i


@T.macro
def by_one_thread_after_another(X, ws, Z):
    """The thread that updates an element is another one in each iteration."""
    thread = T.get_thread_binding()
    T.copy(X, ws)
    for step in T.serial(STEPS):
        if thread == 40 * step:
            ws[0] = ws[0] + step
    T.copy(ws, Z)


@T.macro
def sums_in_memory(X, ws, Z):
    a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
    c = T.alloc((M, M), "float32", level="l0")
    T.copy(X, a)
    for i, j in T.Parallel(M, M):
        b[i, j] = T.Cast("float16", T.if_then_else(i == j, 1.0, 0.0))
        Z[i, j] = 0.0
    for _ in T.serial(STEPS):
        T.copy(Z, c)
        T.gemm(a, b, c)
        T.copy(c, Z)


@T.macro
def read_in_a_branch(X, ws, Z):
    """Both cases begin with a barrier, and then one of them reads the tile."""
    tile, other = T.alloc((N,), "float32", level="l1"), T.alloc((N,), "float32", level="l1")
    T.copy(X, tile)
    T.copy(X, other)
    if X[0] < 100:
        for i in T.Parallel(N):
            other[N - 1 - i] = tile[i] + 1
        for i in T.Parallel(N):
            Z[i] = other[i] + tile[N - 1 - i]
    else:
        for i in T.Parallel(N):
            other[N - 1 - i] = X[i]
        for i in T.Parallel(N):
            Z[i] = other[i]
    for i in T.Parallel(N):
        tile[i] = 0.0
    for i in T.Parallel(N):
        Z[i] += tile[N - 1 - i]


@T.macro
def read_in_both_cases(X, ws, Z):
    """A barrier in the first case is none for the other one."""
    tile = T.alloc((16, 16), "float32", level="l1")
    T.copy(X, tile)
    if X[0, 0] < -100:
        for i, j in T.Parallel(16, 16):
            tile[i, 15 - j] = T.Cast("float32", i + j)
    else:
        for i, j in T.Parallel(16, 16):
            tile[j, i] = 2 * tile[j, i] + 1
    T.copy(tile, Z)


@T.macro
def read_behind_a_branch(X, ws, Z):
    """A barrier in a branch that no rank takes does not order accesses after the branch."""
    tile, other = T.alloc((N,), "float32", level="l1"), T.alloc((N,), "float32", level="l1")
    for i in T.Parallel(N):
        tile[i] = X[i]
    with T.Scale("device") as (rank, _):
        if rank > 100:
            for i in T.Parallel(N):
                other[N - 1 - i] = X[i]
            for i in T.Parallel(N):
                other[i] = X[i]
    for i in T.Parallel(N):
        Z[i] = tile[T.max(N - 1 - i, 1)]


@T.macro
def loaded_by_few(X, ws, Z):
    """Two statements of one warp, in a loop: as one branch they would have a barrier inside."""
    few, tile = T.alloc((32,), "float32", level="l0"), T.alloc((32,), "float32", level="l1")
    T.copy(X[0:32], few)
    for turn in T.serial(3):
        T.copy(few, tile)
        for i in T.Parallel(32):
            tile[31 - i] = few[i] + tile[31 - i] + turn
        T.copy(few, ws[0:32])
    for i in T.Parallel(N):
        Z[i] = tile[i % 32]


@T.macro
def read_again(X, ws, Z):
    """The threads that store last have read the whole tile themselves, others in a branch before."""
    tile, other = T.alloc((N,), "float32", level="l1"), T.alloc((N,), "float32", level="l1")
    T.copy(X, tile)
    if X[0] < 100:
        for i in T.Parallel(N):
            other[i] = X[i]
        for i in T.Parallel(N):
            Z[i] = other[N - 1 - i] + tile[N - 1 - i]
    else:
        for i in T.Parallel(N):
            other[i] = X[i] + 1
        for i in T.Parallel(N):
            Z[i] = other[N - 1 - i]
    for i in T.Parallel(N):
        Z[i] += tile[i]
    for i in T.Parallel(N):
        tile[i] = 0.0
    for i in T.Parallel(N):
        Z[i] += tile[N - 1 - i]


@T.macro
def read_before_warps(X, ws, Z):
    """All warps read rows that one of them then updates."""
    tile, product = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float32", level="l0")
    one = T.alloc((M, M), "float16", level="l1")
    T.copy(X, tile)
    for i, j in T.Parallel(M, M):
        one[i, j] = T.Cast("float16", T.if_then_else(i == j, 1.0, 0.0))
    T.clear(product)
    T.gemm(tile, one, product)
    with T.Scale("warp") as (w, _):
        for i, j in T.Parallel(M // 2, M):
            tile[w * (M // 2) + i, j] = tile[w * (M // 2) + i, j] + T.Cast("float16", 1.0)
    for i, j in T.Parallel(M, M):
        Z[i, j] = product[i, j] + T.Cast("float32", tile[j, i])


@T.macro
def last_iteration(X, ws, Z):
    """A load of what the last iteration of a loop has stored, and no other one."""
    for step in T.serial(4):
        for i in T.Parallel(N):
            ws[step * N + i] = 2 * X[step * N + i]
    for i in T.Parallel(4 * N):
        Z[i] = ws[4 * N - 1 - i % N]


@T.macro
def read_in_an_else(X, ws, Z):
    """A barrier in the first case is none for what the other one reads of the iteration before."""
    tile, other = T.alloc((N,), "float32", level="l1"), T.alloc((N,), "float32", level="l1")
    T.copy(X, tile)
    for step in T.serial(STEPS):
        if X[step] > 0:
            for i in T.Parallel(N):
                other[i] = X[i] + step
            for i in T.Parallel(N):
                Z[i] = other[N - 1 - i]
        else:
            for i in T.Parallel(N):
                Z[i] = tile[N - 1 - i]
        for i in T.Parallel(N):
            tile[i] = X[i] + step


@T.macro
def ragged(X, ws, Z):
    for i in T.Parallel(1000):
        ws[i] = X[i]
    for i in T.Parallel(1000):
        Z[i] = T.if_then_else(i % 3 == 0, ws[i], X[i] + 1)


@T.macro
def random_numbers(X, ws, Z):
    T.rng_init(5)
    for i in T.Parallel(300):
        ws[i] = X[i] * T.Cast("float32", T.rng_rand())
    for i in T.Parallel(300):
        Z[i] = ws[299 - i]


@T.macro
def until_large(X, ws, Z):
    for i in T.Parallel(N):
        ws[i] = T.min(T.max(X[N - 1 - i], -3.0), 3.0)
    while ws[0] < 5:
        for i in T.Parallel(N):
            ws[N - 1 - i] = ws[N - 1 - i] + 1
    for i in T.Parallel(N):
        Z[i] = ws[i]


@T.macro
def shorter_in_each_turn(X, ws, Z):
    for i in T.Parallel(N):
        ws[i] = 6 + T.min(T.abs(X[i]), 1.0)
    left = T.alloc_var("int32")
    left = T.Cast("int32", ws[N - 1])
    for turn in T.serial(left):
        left = left - 1
        for i in T.Parallel(N):
            Z[i] = ws[N - 1 - i] + turn
        for i in T.Parallel(N):
            ws[i] = Z[i]
    for i in T.Parallel(N):
        Z[i] = ws[i] + left


PROGRAMS: dict[str, Callable[[], Any]] = {
    "reversed_row": lambda: program(256, (N,), reversed_row),
    "stencil": lambda: program(256, (M, M), stencil),
    "layouts": lambda: program(128, (M, M), layouts, "float16"),
    "bulk_store": lambda: program(256, (M, M), bulk_store),
    "bulk_stores": lambda: program(128, (M, M), bulk_stores),
    "loaded_ahead": lambda: program(128, (M, M), loaded_ahead, "float16"),
    "turns": lambda: program(256, (N,), turns),
    "warpgroups": lambda: program(256, (N,), warpgroups),
    "updates": lambda: program(256, (N,), updates),
    "stored_again": lambda: program(256, (N,), stored_again),
    "vectors_and_elements": lambda: program(256, (4 * N,), vectors_and_elements),
    "ragged": lambda: program(128, (1000,), ragged),
    "random_numbers": lambda: program(128, (300,), random_numbers),
    "sliding": lambda: program(256, (N,), sliding),
    "loaded_by_two": lambda: program(256, (N,), loaded_by_two),
    "of_other_threads": lambda: program(256, (N,), of_other_threads),
    "next_threads": lambda: program(256, (N,), next_threads),
    "by_a_warp": lambda: program(256, (N,), by_a_warp),
    "by_one_thread_after_another": lambda: program(256, (N,), by_one_thread_after_another),
    "sums_in_memory": lambda: program(128, (M, M), sums_in_memory, "float16"),
    "read_in_a_branch": lambda: program(256, (N,), read_in_a_branch),
    "read_in_both_cases": lambda: program(256, (16, 16), read_in_both_cases),
    "read_behind_a_branch": lambda: program(256, (N,), read_behind_a_branch),
    "loaded_by_few": lambda: program(256, (N,), loaded_by_few),
    "last_iteration": lambda: program(256, (4 * N,), last_iteration),
    "read_in_an_else": lambda: program(256, (N,), read_in_an_else),
    "read_again": lambda: program(256, (N,), read_again),
    "until_large": lambda: program(256, (N,), until_large),
    "shorter_in_each_turn": lambda: program(256, (N,), shorter_in_each_turn),
    "read_before_warps": lambda: program(64, (M, M), read_before_warps, "float16"),
}
