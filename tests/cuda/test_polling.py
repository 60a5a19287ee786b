# SPDX-License-Identifier: MIT
"""Lowered polling loops: which threads poll, the loop's markers, and idle iterations."""

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.support import bodies, source

CALLS = re.compile(r"tilescale::(begins|iteration<\d>|mixed|noted|look|broadcast|wait)(?=[<(])|(loop\d)\[2\] = ")


def text(statements: Any) -> str:
    """The text of the macro `statements(X, F, tile, word)`, with the functions that it calls."""

    @T.prim_func
    def program(X: T.Tensor((128,), "int32"), F: T.Tensor((4, 8), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"):
                tile, word = T.alloc((128,), "int32"), T.alloc((4,), "int32", level="l1")
                T.copy(X, tile)
                T.fill(word, 1)
                statements(X, F, tile, word)
                T.copy(tile, X)

    return source(program)


def calls(statements: Any) -> list[str]:
    """Its calls that have to do with polling, and marks of iterations that are not idle."""
    functions, _, _ = (found := text(statements)).partition('extern "C" __global__')
    body = bodies(found)
    called = re.findall(r"tilescale::(\w+)[<(]", body)
    assert not [name for name in called if not re.search(rf"\b{name}\(", functions)]
    names = [next(filter(None, match.groups())) for match in CALLS.finditer(body)]
    return ["busy" if name.startswith("loop") else name for name in names]


@T.macro
def by_its_condition(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while T.atomic_load(F[3, 5]) < 7:
        n += 1


@T.macro
def by_a_variable(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        n = T.atomic_load(F[3, 5])


@T.macro
def with_an_operation(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while T.atomic_load(F[3, 5]) < 7:
        T.fill(tile, n)


@T.macro
def with_a_store(X, F, tile, word):
    while T.atomic_load(F[3, 5]) < 7:
        tile[3] = 5


@T.macro
def around_a_loop(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        while T.atomic_load(F[3, 5]) < n:
            n += 2
        n += 1


@T.macro
def around_a_loop_and_a_load(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        while T.atomic_load(F[3, 5]) < n:
            while T.atomic_load(F[3, 6]) < n:
                n += 2
        n = T.atomic_load(F[3, 7])


@T.macro
def around_a_wait(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        T.wait(F[3, 5], ">=", n)
        n += 1


@T.macro
def without_others(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        n += 1
        F[3, 5] = n


@T.macro
def in_one_thread(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    if T.get_thread_binding() == 0:
        while T.atomic_load(F[3, 5]) < 7:
            n += 1


@T.macro
def beside_iterations_of_all(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while T.atomic_load(F[3, 5]) < 7:
        for i in T.Parallel(128):
            tile[i] = T.atomic_load(F[3, i % 8])
        n += 1


@T.macro
def around_a_parallel_loop(X, F, tile, word):
    while T.atomic_load(F[3, 5]) < 7:
        for i in T.Parallel(128):
            tile[i] = i


@T.macro
def around_a_serial_loop(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        for i in T.serial(8):
            n = T.atomic_load(F[3, i])


@T.macro
def left_by_a_break(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n >= 0:
        if T.atomic_load(F[3, 5]) > 3:
            T.loop_break()
        n += 1


@T.macro
def with_a_branch(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    while n < 7:
        if T.atomic_load(F[3, 5]) > 3:
            n += 7
        else:
            T.fill(tile, n)


@pytest.mark.parametrize(
    ("statements", "wanted"),
    [
        (by_its_condition, ["begins", "broadcast", "iteration<1>", "noted", "look"]),
        (by_a_variable, ["begins", "broadcast", "iteration<1>", "mixed", "broadcast", "noted", "look"]),
        (with_an_operation, ["begins", "broadcast", "iteration<1>", "noted", "look", "busy"]),
        (with_a_store, ["begins", "broadcast", "iteration<1>", "noted", "look"]),
        (around_a_loop, ["begins", "broadcast", "iteration<0>", "mixed",
                         "begins", "broadcast", "iteration<1>", "noted", "look", "mixed", "busy"]),
        (around_a_loop_and_a_load, ["begins", "broadcast", "iteration<1>", "mixed",
                                    "begins", "broadcast", "iteration<1>", "noted", "look", "mixed",
                                    "begins", "broadcast", "iteration<1>", "noted", "look", "mixed", "busy", "busy",
                                    "broadcast", "noted", "look"]),
        (around_a_wait, ["begins", "broadcast", "iteration<0>", "mixed", "busy", "wait"]),
        (beside_iterations_of_all, ["begins", "broadcast", "iteration<1>", "noted", "look", "noted", "look"]),
        (around_a_parallel_loop, ["begins", "broadcast", "iteration<1>", "noted", "look", "busy"]),
        (around_a_serial_loop, ["begins", "broadcast", "iteration<1>", "mixed", "broadcast", "noted", "look"]),
        (left_by_a_break, ["begins", "broadcast", "iteration<1>", "mixed", "broadcast", "noted", "look"]),
        (with_a_branch, ["begins", "broadcast", "iteration<1>", "mixed", "broadcast", "noted", "look", "busy"]),
        (without_others, []),
        (in_one_thread, ["begins", "iteration<1>", "noted", "look"]),
    ],
)  # fmt: skip
def test_a_loop_that_waits_asks_whether_it_goes_on(statements: Any, wanted: list[str]):
    """`busy` marks an iteration that is not idle: before its synchronization with others, or after a loop."""
    assert calls(statements) == wanted


@T.macro
def of_shared_memory(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    n = T.atomic_load(word[2])
    if n > 3:
        T.signal(F[0, 0])


@T.macro
def of_device_memory(X, F, tile, word):
    n = T.alloc_var("int32", init=0)
    n = T.atomic_load(F[3, 5])
    if n > 3:
        T.signal(F[0, 0])


def test_a_load_outside_of_a_loop_is_one_of_the_unit():
    assert calls(of_shared_memory) == ["broadcast"]
    assert calls(of_device_memory) == ["broadcast", "look"]


def test_a_failed_wait_has_the_index_of_the_flag():
    """And how many flags there are."""
    assert "look((&(F[0])), 29, 32," in bodies(text(of_device_memory))
