# SPDX-License-Identifier: MIT
"""Conditions that are uniform over a unit's threads, and others: the signalling units are known before a run."""

from typing import Any

import pytest

import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.passes.uniformity import Uniformity
from tilescale.program.effects import phases

MACHINE = Machine.load("h200-sxm-8")


def signalling(statements: Any, level: str = "block") -> Any:
    """Traces the macro `statements(N, flags, tx)`, executed by the units of a level of two warpgroups."""

    @T.prim_func
    def program(N: T.Tensor((256,), "int32"), F: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            tx = T.get_thread_binding()
            with T.Scale(level), T.Scale("device"):
                statements(N, F, tx)

    return program


# -- what is decided alike ---------------------------------------------------------------------------------------------


@T.macro
def whole_units(N, flags, tx):
    if tx // 128 == 1:
        T.signal(flags[0], dst=1)


@T.macro
def some_warps(N, flags, tx):
    if T.rank("warp") > 2:
        T.signal(flags[0], dst=1)  # some warps


@T.macro
def first_threads(N, flags, tx):
    if tx % 128 < 64:
        T.signal(flags[0], dst=1)


@T.macro
def not_the_first_units(N, flags, tx):
    if tx < 128:
        N[tx] = 1
    else:
        T.signal(flags[0], dst=1)


@T.macro
def name_of_an_element(N, flags, tx):
    n = N[3] + 1
    if n > 3:
        T.signal(flags[0], dst=1)


@T.macro
def one_element_in_registers(N, flags, tx):
    n = T.alloc((1,), "int32", level="l0")
    n[0] = N[3]
    if n[0] > 3:
        T.signal(flags[0], dst=1)


@T.macro
def atomic_load_of_all(N, flags, tx):
    if T.atomic_load(N[3]) > 3:
        T.signal(flags[0], dst=1)


@T.macro
def overwritten(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    n = tx
    N[tx] = n
    n = N[3]
    if n > 3:
        T.signal(flags[0], dst=1)


@T.macro
def result_of_one(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    n = tx
    n = T.invoke_one(T.atomic_add(N[0], n, return_prev=True))
    if n > 3:
        T.signal(flags[0], dst=1)


def iterations_of(program: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    iterations: list[Any] = []
    follow = Uniformity._iteration
    monkeypatch.setattr(Uniformity, "_iteration", lambda *given: (iterations.append(given), follow(*given)))
    analyse(program, MACHINE)
    return len(iterations)


@T.macro
def nested_loops(N, flags, tx):
    total = T.alloc((1,), "int32", level="l0")
    for a in T.serial(2):
        for b in T.serial(2):
            for c in T.serial(2):
                for d in T.serial(2):
                    total[0] += N[a + b + c + d]
    T.signal(flags[0], dst=1)


@T.macro
def sums_in_nested_loops(N, flags, tx):
    total = T.alloc((1,), "int32", level="l0")
    for a in T.serial(2):
        for b in T.serial(2):
            for c in T.serial(2):
                total[0] = 0
                for d in T.serial(2):
                    total[0] += N[a + b + c + d + tx]
    T.signal(flags[0], dst=1)


def test_the_body_of_nested_loops_is_followed_once_or_twice_a_level(monkeypatch: pytest.MonkeyPatch):
    iterations = iterations_of(signalling(nested_loops), monkeypatch)
    assert iterations == 4 + 3 + 2 + 1 + 4, "of 4 trials, each with those inside, and of 4 checks"


def test_values_of_loops_inside_are_known_in_the_next_turn(monkeypatch: pytest.MonkeyPatch):
    """A value that comes to differ in the innermost loop takes one more trial of each loop, once."""
    iterations = iterations_of(signalling(sums_in_nested_loops), monkeypatch)
    assert iterations == (5 + 4 + 3 + 2) + 3 + 2 + 1 + 4


def test_a_phase_in_which_units_do_nothing_together_is_not_followed(monkeypatch: pytest.MonkeyPatch):
    @T.prim_func
    def alone(N: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=128):
            for i in T.serial(8):
                N[i] = i

    assert iterations_of(alone, monkeypatch) == 0


@pytest.mark.parametrize(
    ("statements", "level"),
    [
        (whole_units, "warpgroup"),
        (whole_units, "warp"),
        (some_warps, "warp"),
        (first_threads, "warpgroup"),
        (not_the_first_units, "warpgroup"),
        (name_of_an_element, "block"),
        (one_element_in_registers, "block"),
        (atomic_load_of_all, "block"),
        (overwritten, "block"),
        (result_of_one, "block"),
    ],
)
def test_what_threads_of_a_unit_decide_alike(statements: Any, level: str):
    analyse(signalling(statements, level), MACHINE)


# -- what they may decide differently ----------------------------------------------------------------------------------


@T.macro
def named_element_of_the_thread(N, flags, tx):
    n = N[tx] + 1  # set
    if n > 3:
        T.signal(flags[0], dst=1)  # differs


@T.macro
def second_half_of_each_unit(N, flags, tx):
    if tx % 128 >= 64:
        T.signal(flags[0], dst=1)  # second half


@T.macro
def element_of_a_tile(N, flags, tx):
    n = T.alloc((256,), "int32", level="l0")
    T.fill(n, 4)
    if n[3] > 3:
        T.signal(flags[0], dst=1)  # of a tile


@T.macro
def handed_on_from_iteration_to_iteration(N, flags, tx):
    a, b = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
    c, d = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
    for _ in T.serial(9):
        if a > 3:
            T.signal(flags[0], dst=1)  # handed on
        a = b
        b = c
        c = d
        d = tx


@T.macro
def one_of_two_ways(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    if N[0] > 3:
        n = tx
    else:
        n = 5
    if n > 3:
        T.signal(flags[0], dst=1)  # two forms


@T.macro
def iterations_of_each_thread(N, flags, tx):
    for _ in T.serial(N[tx]):
        T.signal(flags[0], dst=1)  # iterations


@T.macro
def what_a_loop_of_the_thread_has_set(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    for i in T.serial(N[tx]):
        n = i
    if n > 3:
        T.signal(flags[0], dst=1)  # last iteration


@T.macro
def left_early(N, flags, tx):
    for i in T.serial(9):
        if N[0] > 2:
            if N[tx] == i:
                T.loop_break()
        T.signal(flags[0], dst=1)  # left


@T.macro
def value_that_differs(N, flags, tx):
    T.signal(flags[0], N[tx], dst=1)  # a value


@T.macro
def loaded_by_each_part(N, flags, tx):
    if N[3] > 3:
        with T.Scale("warpgroup"), T.Scale("device"):
            T.signal(flags[0], dst=1)  # larger


@pytest.mark.parametrize(
    ("statements", "level", "line", "found"),
    [
        (named_element_of_the_thread, "block", "differs", "n > 3"),
        (second_half_of_each_unit, "warpgroup", "second half", "of a warpgroup does not pass: tx % 128 >= 64"),
        (whole_units, "block", None, "the first thread of a block does not pass"),
        (not_the_first_units, "block", None, "the first thread of a block does not pass"),
        (element_of_a_tile, "block", "of a tile", "n[3] > 3"),
        (handed_on_from_iteration_to_iteration, "block", "handed on", "a > 3"),
        (one_of_two_ways, "block", "two forms", "n > 3"),
        (iterations_of_each_thread, "block", "iterations", "N[tx]"),
        (what_a_loop_of_the_thread_has_set, "block", "last iteration", "n > 3"),
        (some_warps, "block", "some warps", "the first thread of a block does not pass: warp_rank > 2"),
        (left_early, "block", "left", "in a loop that threads of a block may leave in different iterations"),
        (loaded_by_each_part, "warp", "larger", "may differ between threads of a warpgroup: N[3] > 3"),
        (value_that_differs, "block", "a value", "an operand that differs between threads of a block: N[tx]"),
    ],
)
def test_what_threads_of_a_unit_may_decide_differently(statements: Any, level: str, line: str | None, found: str):
    with pytest.raises(UsageError) as caught:
        analyse(signalling(statements, level), MACHINE)
    assert found in caught.value.message
    lines = [place.line for place in caught.value.where if place.file == __file__]
    assert line is None or lines[0] == line_of(line)
    assert line != "differs" or line_of("set") in lines


# -- what a unit polls as one ------------------------------------------------------------------------------------------


@T.macro
def polled_by_all(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    n = T.atomic_load(N[0])
    while T.atomic_load(N[3]) < n:
        N[tx] = 1


@T.macro
def polled_by_some(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    if tx > 5:
        n = T.atomic_load(N[0])
        while T.atomic_load(N[3]) < n:
            N[tx] = 1


@T.macro
def polled_by_each(N, flags, tx):
    n = T.alloc_var("int32", init=0)
    n = T.atomic_load(N[tx])
    while T.atomic_load(N[3]) < n:
        N[tx] = 1


@T.macro
def rounds_of_all(N, flags, tx):
    for i in T.serial(T.atomic_load(N[0])):
        N[tx] = i


@T.macro
def rounds_of_each(N, flags, tx):
    for i in T.serial(T.atomic_load(N[tx])):
        N[tx] = i


@pytest.mark.parametrize(
    ("statements", "level", "count"),
    [
        (polled_by_all, "block", 2),
        (polled_by_all, "warp", 2),
        (polled_by_all, "thread", 0),
        (polled_by_some, "block", 0),
        (polled_by_each, "block", 0),
        (rounds_of_all, "block", 1),
        (rounds_of_each, "block", 0),
    ],
)
def test_atomic_loads_that_a_unit_makes_as_one(statements: Any, level: str, count: int):
    program = analyse(signalling(statements, level), MACHINE)
    ((phase, launch),) = phases(program.body)
    values = Uniformity(launch, MACHINE)
    values.look(phase.stmt)
    assert len(values.together) == count
