# SPDX-License-Identifier: MIT
"""Order of accesses of one element: by all threads of a block, by some of them, atomically, by functions."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.test_hazards import N, reversed_rows, said, text
from tests.cuda.test_thread_maps import synchronizes


@T.macro
def added_atomically(ws, Z):
    for i in T.Parallel(N):
        T.atomic_add(Z[i], 1.0)
    for i in T.Parallel(N):
        T.atomic_add(Z[N - 1 - i], 2.0)


@T.macro
def added_atomically_then_loaded(ws, Z):
    for i in T.Parallel(N):
        T.atomic_add(Z[i], 1.0)
    for i in T.Parallel(N):
        ws[i] = Z[N - 1 - i]


@T.macro
def loaded_by_every_thread(ws, Z):
    first = T.alloc_var("float32")
    first = Z[0]
    for i in T.Parallel(N):
        Z[i] = first


@T.macro
def stored_and_loaded_by_every_thread(ws, Z):
    first = T.alloc_var("float32")
    Z[0] = 5.0
    first = Z[0]
    Z[1] = first


@T.macro
def stored_by_a_warp(ws, Z):
    thread = T.get_thread_binding()
    if thread // 32 == 1:
        Z[0] = 5.0
    for i in T.Parallel(N):
        ws[i] = Z[0]


@T.macro
def passed_to_a_function(ws, Z):
    T.call_extern("float32", "user::sum", T.address_of(Z[0]))
    for i in T.Parallel(N):
        ws[i] = Z[i]


@T.macro
def passed_to_a_function_of_values(ws, Z):
    T.call_extern("float32", "user::root", Z[3])
    for i in T.Parallel(N):
        Z[i] = 1.0


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (added_atomically, []),
        (added_atomically_then_loaded, ["before the load of Z: threads synchronize (stored)"]),
        (loaded_by_every_thread, ["before the store to Z: threads synchronize (read)"]),
        (stored_and_loaded_by_every_thread, []),
        (stored_by_a_warp, ["before the load of Z: threads synchronize (stored)"]),
        (passed_to_a_function, ["before the load of Z: threads synchronize (stored)"]),
        (passed_to_a_function_of_values, ["before the store to Z: threads synchronize (read)"]),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_what_one_thread_does_to_an_element_and_others_see(statement: Any, expected: list[str]):
    assert said(reversed_rows(statement)) == expected


@T.prim_func
def update(Z: T.Tensor((N,), "float32")):
    with T.Kernel(device=2, block=1, threads=N), T.Scale("block"):
        own = T.alloc((1,), "float32", level="l1")
        own[0] = 1.0
        Z[0] = Z[0] + 1
        own[0] = own[0] + 1
        for i in T.Parallel(N):
            Z[i] = Z[0] + own[0]


def test_one_thread_updates_an_element():
    assert said(update)[0] == "the update of an element of Z: by one thread"
    assert re.search(r"if \(\(\(int\)threadIdx\.x\) == 0\) \{\s+Z\[0\] = \(Z\[0\]", text(update))


def by_selected(first: Any, second: Any) -> Any:
    """A program of 64 x 4 threads: those that one condition selects store an element, those of the other one load it.
    """

    @T.prim_func
    def made(X: T.Tensor((N,), "float32"), Z: T.Tensor((N,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=1, threads=(64, 4)), T.Scale("block"):
            x, y = T.get_thread_binding(0), T.get_thread_binding(1)
            if first(x, y, n):
                Z[n] = X[n]
            if second(x, y, n):
                X[n] = Z[n]

    return made


@pytest.mark.parametrize(
    ("first", "second", "needs"),
    [
        (lambda x, y, n: T.And(x == 2, y == 3), lambda x, y, n: T.And(n > 5, T.And(3 == y, x == 2)), False),
        (lambda x, y, n: T.And(x == 2, y == 3), lambda x, y, n: T.And(x == 2, y == 1), True),
        (lambda x, y, n: T.And(x == 2, y == 3), lambda x, y, n: T.Or(x == 2, y == 3), True),
        (lambda x, y, n: x == 2, lambda x, y, n: x == 2, True),
        (lambda x, y, n: T.And(x == n, y == 3), lambda x, y, n: T.And(x == n, y == 3), True),
        (lambda x, y, n: T.And(x <= 2, y <= 3), lambda x, y, n: T.And(x <= 2, y <= 3), True),
    ],
)
def test_a_selected_thread_is_in_order_with_itself(first: Any, second: Any, needs: bool):
    """A thread of constant indices: another condition may select another thread later."""
    assert synchronizes(by_selected(first, second)) == needs
