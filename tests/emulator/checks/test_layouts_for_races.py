# SPDX-License-Identifier: MIT
"""Layouts that the check of races between threads asks TileLang for: most programs take less time than the answer."""

from typing import Any

import pytest

import tilescale.language as T
from tests.emulator.checks.test_races_between_threads import N, given, is_silent, program, sums_of_a_product_kept
from tilescale.backends.emulator.checks import threads


@T.macro
def sums_stored(sums, W, at, begin):
    for i, j in T.Parallel(16, 16):
        W[at, begin + i * 16 + j] = sums[i, j]


@T.macro
def product(sums):
    left, right = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), "float16")
    T.clear(left)
    T.clear(right)
    T.gemm(left, right, sums, clear_accum=True)


@T.macro
def stored_once(X, W, at, b):
    sums = T.alloc_fragment((16, 16), "float32")
    product(sums)
    sums_stored(sums, W, b, 0)


@T.macro
def stored_by_one_warp_and_another(X, W, at, b):
    sums = T.alloc_fragment((16, 16), "float32")
    product(sums)
    if T.get_thread_binding() < 32:
        sums_stored(sums, W, b, 0)
    else:
        sums_stored(sums, W, b, N)


@T.prim_func
def loaded_by_another_launch(
    X: T.Tensor((2, N), "float32"), W: T.Tensor((2, N), "float32"), at: T.Tensor((N,), "int32")
):
    with T.Kernel(2, threads=32) as b:
        sums = T.alloc_fragment((16, 16), "float32")
        product(sums)
        sums_stored(sums, W, b, 0)
    with T.Kernel(2, threads=32) as b:
        row = T.alloc_fragment((N,), "float32")
        T.copy(W[b, 0:N], row)
        T.copy(row, X[b, 0:N])


@pytest.mark.parametrize(
    ("func", "size"),
    [
        (program(stored_once, N, 32), N),
        (program(stored_by_one_warp_and_another, 2 * N, 64), 2 * N),
        (loaded_by_another_launch, N),
    ],
)
def test_tilelang_is_not_asked_for_layouts_where_no_two_threads_can_race(
    func: Any, size: int, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []
    monkeypatch.setattr(threads, "inferred", lambda *given: asked.append(given) or {})
    is_silent(func, given(size))
    assert not asked
    is_silent(program(sums_of_a_product_kept, threads=32), given())
    assert asked
