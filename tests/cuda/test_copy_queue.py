# SPDX-License-Identifier: MIT
"""Operations on a device's copy queue, and reasons against the others."""

from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.support import notes, source
from tests.cuda.test_device_phases import steps
from tilescale.errors import UnsupportedError

DEVICES, ROWS, COLUMNS, CHUNK = 4, 20, 8, 3
FLAGS = 7  # chunks of the rows


def on_devices(statements: Any) -> Any:
    """Traces the macro `statements(X, Y, F, flags, done, rank, size)` in a device phase before a grid that signals
    `done`; F is the caller's."""

    @T.prim_func
    def f(
        X: T.Tensor((ROWS, COLUMNS), "float32"),
        Y: T.Tensor((DEVICES, ROWS, COLUMNS), "float32"),
        F: T.Tensor((DEVICES, FLAGS), "int32"),
    ):
        with T.Kernel(device=DEVICES, block=2, threads=32) as bx:
            flags = T.alloc_flags((DEVICES, FLAGS))
            done = T.alloc_flags((2,))
            with T.Scale("device") as (rank, size):
                statements(X, Y, F, flags, done, rank, size)
            with T.Scale("block"):
                X[bx, 0] = 1
                T.signal(done[bx])

    return f


# -- what goes on the queue --------------------------------------------------------------------------------------------


@T.macro
def own_row(X, Y, F, flags, done, rank, size):
    for step in T.serial(1, size):
        T.copy(X, Y[rank, 0, 0], dst=(rank + step) % size, signal=flags[rank, step])


@T.macro
def one_flag_each(X, Y, F, flags, done, rank, size):
    for k in T.serial(2):
        T.copy(X[k * 10 : k * 10 + 10, :], Y[rank, k * 10, 0], dst=(rank + 1) % size, signal=flags[0, 0])


@T.macro
def own_signals(X, Y, F, flags, done, rank, size):
    T.signal(flags[rank, 0])
    if rank != 2:
        T.copy(X, Y[rank, 0, 0], dst=2, signal=flags[rank, 0])


@T.macro
def set_by_anybody(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=0, signal=F[0, 0], value=rank, op="set")


@T.macro
def after_the_grid(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[0, 0], after=(done[0], ">=", 1))


@T.macro
def gathered(X, Y, F, flags, done, rank, size):
    T.all_gather(X, Y, signal=flags, chunk=CHUNK)


@T.macro
def exchanged(X, Y, F, flags, done, rank, size):
    given = T.alloc((DEVICES, ROWS, COLUMNS), "float32", level="l2")
    T.all_to_all(given, Y, signal=flags, chunk=CHUNK)


@pytest.mark.parametrize(
    ("statements", "wanted"),
    [
        (own_row, ["For", "  copy queue"]),
        (one_flag_each, ["For", "  copy queue"]),
        (own_signals, ["grid 1 x 1", "IfThenElse", "  copy queue"]),
        (set_by_anybody, ["copy queue"]),
        (after_the_grid, ["copy queue"]),
        (gathered, ["all_gather queue"]),
        (exchanged, ["all_to_all queue"]),
    ],
)
def test_the_queue_takes_what_the_host_knows(statements: Any, wanted: list[str]):
    func = on_devices(statements)
    assert steps(func) == [*wanted, "grid 2 x 32", "join"]
    assert any("asynchronous, on the copy queue" in note for note in notes(func))
    source(func)


@T.macro
def callers_flags(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=F[rank, 0])


@T.macro
def from_two_sides(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[0, 0])
    T.copy(X, Y[rank, 0, 0], dst=(rank + 2) % size, signal=flags[0, 0])


@T.macro
def grid_too(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=done[0])


@T.macro
def cleared_too(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[rank, 0])
    T.clear(flags)


@T.macro
def how_often(X, Y, F, flags, done, rank, size):
    while F[0, 0] < 3:
        T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[rank, 0])


@T.macro
def by_programs(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[rank, 0], impl="lsu")


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (callers_flags, "'F' may hold anything when a call begins (T.alloc_flags"),
        (from_two_sides, "several may raise the same flag of 'flags'"),
        (grid_too, "the host does not know before a call what else is added to 'done'"),
        (cleared_too, "the host does not know before a call what else is added to 'flags'"),
        (how_often, "the host does not know before a call what else is added to 'flags'"),
        (by_programs, "impl='lsu': is started by the program, not by the host"),
    ],
)
def test_what_the_queue_does_not_take_is_done_in_order_and_said(statements: Any, reason: str):
    func = on_devices(statements)
    assert not any(line.strip() in ("copy queue", "join") for line in steps(func))
    assert any("synchronous" in note and reason in note for note in notes(func))


def test_what_is_done_in_order_waits_for_what_was_started_before():
    @T.macro
    def both(X, Y, F, flags, done, rank, size):
        T.copy(X, Y[rank, 0, 0], dst=(rank + 1) % size, signal=flags[rank, 0])
        T.copy(X, Y[rank, 0, 0], dst=(rank + 2) % size, signal=F[rank, 0])

    assert steps(on_devices(both))[:4] == ["copy queue", "join", "grid 1 x 256", "grid 1 x 1"]


@T.macro
def waits_and_is_no_sum(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=0, signal=F[0, 0], after=(done[0], ">=", 1))  # <-


@T.macro
def waits_for_less(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=0, signal=flags[rank, 0], after=(done[0], "<", 1))  # <-


@T.macro
def beside_a_wait(X, Y, F, flags, done, rank, size):
    T.copy(X, Y[rank, 0, 0], dst=0, signal=flags[rank, 0], after=(done[0], ">=", 1))
    T.copy(X, Y[rank, 0, 0], dst=0, signal=F[0, 1])  # <-


@T.macro
def gathers_to_callers_flags(X, Y, F, flags, done, rank, size):
    T.all_gather(X, Y, signal=F, chunk=CHUNK)  # <-


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        (waits_and_is_no_sum, "'F' may hold anything"),
        (waits_for_less, "a stream waits for >=, >, ==, not for <"),
        (beside_a_wait, "in a program where a copy waits for a flag"),
        (gathers_to_callers_flags, "'F' may hold anything"),
    ],
)
def test_what_can_only_be_asynchronous_names_its_line(statements: Any, found: str, mistake):
    func = on_devices(statements)
    with mistake(UnsupportedError, found):
        source(func)


def test_flags_of_rows_whose_number_is_open():
    """The condition differs between senders and is known; the number of chunks is not."""
    m = T.dynamic("m")

    @T.prim_func
    def f(X: T.Tensor((m, COLUMNS), "float32"), Y: T.Tensor((4, m, COLUMNS), "float32")):
        with T.Kernel(device=4):
            flags = T.alloc_flags((4, 64))
            with T.Scale("device") as (rank, size):
                for c in T.serial(m // 8):
                    T.copy(X[c * 8 : c * 8 + 8, :], Y[rank, c * 8, 0], dst=(rank + 1) % size, signal=flags[rank, c])

    assert steps(f) == ["For", "  copy queue", "join"]
