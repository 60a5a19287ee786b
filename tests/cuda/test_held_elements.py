# SPDX-License-Identifier: MIT
"""Copies between device memory and fragments: no barrier separates accesses by the thread that holds an element."""

from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.test_thread_maps import SQUARE, M, N, program, synchronizes


@T.macro
def through_a_fragment(X, Z, at, n):
    tile = T.alloc((M, M), "float32", level="l0")
    T.copy(Z, tile)
    for i, j in T.Parallel(M, M):
        tile[i, j] *= 2
    T.copy(tile, Z)


@T.macro
def by_elements_of_a_fragment(X, Z, at, n):
    tile = T.alloc((M, M), "float32", level="l0")
    T.copy(Z, tile)
    for i, j in T.Parallel(M, M):
        if i + n < M:
            Z[i, j] = tile[i, j] + X[j, i]


@T.macro
def by_transposed_elements(X, Z, at, n):
    tile = T.alloc((M, M), "float32", level="l0")
    for i, j in T.Parallel(M, M):
        tile[j, i] = Z[i, j]
    for i, j in T.Parallel(M, M):
        Z[j, i] = tile[i, j] + 1


@T.macro
def from_a_variable_on(X, Z, at, n):
    first = T.alloc_var("int32")
    first = n * 2
    tile = T.alloc((16, M), "float32", level="l0")
    T.copy(Z[first, 0], tile)
    T.copy(tile, Z[first, 0])


@T.macro
def from_a_variable_that_changes(X, Z, at, n):
    first = T.alloc_var("int32")
    first = n * 2
    tile = T.alloc((16, M), "float32", level="l0")
    T.copy(Z[first, 0], tile)
    first = first + 1
    T.copy(tile, Z[first, 0])


@T.macro
def in_another_place(X, Z, at, n):
    tile = T.alloc((16, M), "float32", level="l0")
    T.copy(Z[0, 0], tile)
    T.copy(tile, Z[1, 0])


@T.macro
def through_a_row(X, Z, at, n):
    tile = T.alloc((1, 4 * N), "float32", level="l0")
    T.copy(Z[n, 0], tile)
    T.copy(tile, Z[n, 0])


@T.macro
def columns_of_a_product(X, Z, at, n):
    a, c = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float32", level="l0")
    for i, j in T.Parallel(M, M):
        a[i, j] = T.cast(X[i, j], "float16")
    T.clear(c)
    T.gemm(a, a, c)
    for i in T.Parallel(M):
        Z[i, 0] = c[i, 0]
    for i in T.Parallel(M):
        X[i, 0] = Z[i, 0] + c[i, 5]


@T.macro
def of_fewer_elements_than_threads(X, Z, at, n):
    tile = T.alloc((1, M), "float32", level="l0")
    T.copy(Z[0, 0], tile)
    T.copy(tile, Z[0, 0])


@T.macro
def of_a_row_for_all(X, Z, at, n):
    row = T.alloc((M,), "float32", level="l0")
    tile = T.alloc((M, M), "float32", level="l0")
    T.copy(Z[0, 0:M], row)
    for i, j in T.Parallel(M, M):
        tile[i, j] = row[j]
    T.copy(row, Z[0, 0:M])
    T.copy(tile, X)


@T.macro
def elements_of_a_row_for_all(X, Z, at, n):
    row = T.alloc((M,), "float32", level="l0")
    tile = T.alloc((M, M), "float32", level="l0")
    for j in T.Parallel(M):
        row[j] = Z[0, j]
    for i, j in T.Parallel(M, M):
        tile[i, j] = row[j]
    for j in T.Parallel(M):
        Z[0, j] = row[j] + 1
    T.copy(tile, X)


@T.macro
def in_turns(X, Z, at, n):
    tile = T.alloc((16, M), "float32", level="l0")
    T.clear(tile)
    for turn in T.serial(n):
        T.copy(Z[turn, 0], tile)
        T.copy(tile, Z[turn, 0])


@T.macro
def sums_of_a_product(X, Z, at, n):
    a, b = T.alloc((M, M), "float16", level="l1"), T.alloc((M, M), "float16", level="l1")
    c = T.alloc((M, M), "float32", level="l0")
    T.copy(Z, c)
    for i, j in T.Parallel(M, M):
        a[i, j] = T.cast(X[i, j], "float16")
        b[i, j] = T.cast(X[j, i], "float16")
    T.gemm(a, b, c)
    T.copy(c, Z)


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        (through_a_fragment, False),
        (by_elements_of_a_fragment, False),
        (by_transposed_elements, True),
        (from_a_variable_on, False),
        (from_a_variable_that_changes, True),
        (in_another_place, True),
        (of_fewer_elements_than_threads, True),
        (of_a_row_for_all, True),
        (elements_of_a_row_for_all, True),
        (in_turns, True),
        (sums_of_a_product, False),
        (columns_of_a_product, True),
    ],
)
def test_a_thread_loads_and_stores_what_it_holds(body: Any, needs: bool):
    assert synchronizes(program(*SQUARE, body)) == needs


def test_dimensions_of_one_element_have_no_part_in_the_distribution():
    assert not synchronizes(program((4, 4 * N), 128, through_a_row))
