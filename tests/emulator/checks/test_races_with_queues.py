# SPDX-License-Identifier: MIT
"""Races with operations of a copy queue: source, target, and operations that its flag does not cover. Deadlocks of
queues.
"""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import SEEDS, in_every_order, line_of, race, tensors
from tests.emulator.support import check_alive
from tilescale.errors import DeadlockError, UninitializedReadError


def test_a_read_of_the_target_that_waits_for_nothing():
    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32"), Z: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0])  # started
            for j in T.Parallel(8):
                Z[b, j] = Y[b, j]  # not waited for

    for seed in SEEDS:
        error = race(program, tensors(2, (4, 8), (4, 8), (4, 8)), "started", "not waited for", seed=seed)
        assert "copy queue writes it" in str(error)
        assert error.hint.endswith(
            f"wait for the flag that line {line_of('started')} signals before line {line_of('not waited for')}"
        )


def test_a_write_to_the_source_while_it_may_be_sent():
    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0])  # sends
            for j in T.Parallel(8):
                X[b, j] = 0  # writes the source

    for seed in SEEDS:
        error = race(program, tensors(2, (4, 8), (4, 8)), "sends", "writes the source", seed=seed)
        assert f"line {line_of('sends')} is asynchronous and reads later" in error.hint


def test_a_wait_for_what_came_speaks_of_what_came_and_not_of_what_was_sent():
    """The local flag signals the arrival of the peer's data; it does not signal that of the local data there."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0])  # reads X
                T.wait(arrived[0], ">=", 1)
                X[0] = 1  # too early

    race(program, [[torch.zeros(8), torch.zeros(8)] for _ in range(2)], "reads X", "too early")


def test_an_answer_says_that_the_source_is_free():
    @T.prim_func
    def program(X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
        with T.Kernel(device=2, threads=32):
            arrived, taken = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                for step in T.serial(3):
                    T.copy(X, Y, dst=1 - rank, signal=arrived[0])
                    T.wait(arrived[0], ">=", step + 1)
                    T.signal(taken[0], dst=1 - rank)
                    T.wait(taken[0], ">=", step + 1)
                    X[0, 0] = X[0, 0] + 1

    in_every_order(program, lambda: tensors(2, (1, 8), (1, 8)))


def test_a_phase_after_the_start_is_not_seen_by_the_copy():
    @T.prim_func
    def program(X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
        with T.Kernel(device=2, threads=32):
            go, arrived = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(go[0], ">=", 1))  # sent later
                T.signal(go[0])
                X[0, 0] = 1  # after the signal

    race(program, tensors(2, (1, 8), (1, 8)), "sent later", "after the signal")


def test_a_count_that_is_too_small():
    """Four blocks count their rows; the copy waits for three of them."""

    def program(count: int):
        @T.prim_func
        def counted(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
            with T.Kernel(device=2, block=4, threads=32) as b:
                done, arrived = T.alloc_flags(1), T.alloc_flags(1)
                with T.Scale("device") as (rank, _):
                    T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(done[0], ">=", count))  # sends rows
                with T.Scale("block"):
                    for j in T.Parallel(8):
                        X[b, j] = 0  # makes rows
                    T.signal(done[0])

        return counted

    in_every_order(program(4), lambda: tensors(2, (4, 8), (4, 8)))
    for seed in SEEDS:
        race(program(3), tensors(2, (4, 8), (4, 8)), "sends rows", "makes rows", seed=seed)


def collected(waits: str, exchanges: bool = False):
    shape = (2, 8, 8) if exchanges else (8, 8)

    @T.prim_func
    def program(X: T.Tensor(shape, "float32"), Y: T.Tensor((2, 8, 8), "float32"), Z: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=(2, 8), threads=32) as (r, i):
            arrived = T.alloc_flags((2, 2))
            with T.Scale("device"):
                if exchanges:
                    T.all_to_all(X, Y, signal=arrived, chunk=4)  # exchanges
                else:
                    T.all_gather(X, Y, signal=arrived, chunk=4)  # gathers
            with T.Scale("block"):
                if waits == "own chunk":
                    T.wait(arrived[r, i // 4], ">=", 1)
                if waits == "first chunk":
                    T.wait(arrived[r, 0], ">=", 1)
                if waits == "own rank":
                    T.wait(arrived[T.rank("device"), i // 4], ">=", 1)
                if i == 5:
                    Z[r, 0] = Y[r, i, 0]  # reads a row

    return program


@pytest.mark.parametrize(("exchanges", "line"), [(False, "gathers"), (True, "exchanges")])
def test_the_flag_of_a_chunk_speaks_of_that_chunk(exchanges: bool, line: str):
    def given():
        return tensors(2, (2, 8, 8) if exchanges else (8, 8), (2, 8, 8), (2, 8))

    in_every_order(collected("own chunk", exchanges), given)
    for seed in SEEDS:
        error = race(collected("first chunk", exchanges), given(), line, "reads a row", seed=seed)
        assert "Y[" in error.message and ", 5, 0]" in error.message
        race(collected("own rank", exchanges), given(), line, "reads a row", seed=seed)


def test_a_gather_of_what_nobody_has_written():
    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, threads=32):
            part = T.alloc((8,), "float32", level="l2")
            arrived = T.alloc_flags((2, 1))
            with T.Scale("device"):
                part[0] = 1
                T.all_gather(part, Y, signal=arrived)  # no reads

    with pytest.raises(UninitializedReadError, match=r"device \d, copy queue reads part\[1:8\]") as caught:
        tilescale.emulate(program, tensors(2, (2, 8)))
    assert caught.value.where[0].line == line_of("no reads")


# -- deadlocks ---------------------------------------------------------------------------------------------------------


def deadlock(program, args, *markers, seed=None):
    """The text of the deadlock that a run ends in; the lines with these markers are named."""
    with pytest.raises(DeadlockError) as caught:
        tilescale.emulate(program, args, schedule_seed=seed)
    text = str(caught.value)
    for marker in markers:
        assert f"{__file__}:{line_of(marker)}" in text
    check_alive()
    return text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_behind_one_that_waits_for_its_effect(seed: int | None):
    @T.prim_func
    def program(X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
        with T.Kernel(device=2, threads=32):
            answered, arrived = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(answered[0], ">=", 1))  # first
                T.copy(X, Y, dst=1 - rank, signal=answered[0])  # second

    text = deadlock(program, tensors(2, (1, 8), (1, 8)), "first", "second", seed=seed)
    assert "copy queue wait for answered[0] >= 1" in text
    assert "now: answered[0] = 0" in text
    assert "behind what device 0, copy queue executes, one more copy waits: " in text


def test_two_devices_whose_queues_wait_for_each_other():
    @T.prim_func
    def program(X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
        with T.Kernel(device=2, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(arrived[0], ">=", 1))  # each after the other

    text = deadlock(program, tensors(2, (1, 8), (1, 8)), "each after the other")
    assert "copy queue wait for arrived[0] >= 1" in text and "device 0; device 1 ended without waiting" in text


def test_a_wait_for_a_copy_that_was_never_started():
    @T.prim_func
    def program(X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
        with T.Kernel(device=2, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                if rank == 1:
                    T.copy(X, Y, dst=0, signal=arrived[0])  # one way
                T.wait(arrived[0], ">=", 1)  # both

    text = deadlock(program, tensors(2, (1, 8), (1, 8)), "one way", "both")
    assert "device 1 waits for arrived[0] >= 1" in text and "no unit has signalled it" in text


def test_a_copy_after_a_count_that_is_never_reached():
    @T.prim_func
    def program(X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
        with T.Kernel(device=2, block=3, threads=32):
            done, arrived = T.alloc_flags(2), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(done[1], ">=", 4))  # four
            with T.Scale("block"):
                T.signal(done[1])  # three of them

    text = deadlock(program, tensors(2, (1, 8), (1, 8)), "four", "three of them")
    assert "device 0, copy queue; device 1, copy queue wait for done[1] >= 4" in text
    assert "now: done[1] = 3" in text
