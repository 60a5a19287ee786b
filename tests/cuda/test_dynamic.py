# SPDX-License-Identifier: MIT
"""Signals, waits and barriers whose control flow depends on data; other than uniform conditions are refused."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies, lowered, ptxas, source
from tests.fuzz.together import joined, renamed
from tilescale.errors import TileScaleError, UsageError

ROWS, COLUMNS = 8, 128


def scheduled(draw):
    """Rows go to the peer, in the order in which tickets are drawn: `draw` from memory, by one thread, or by T."""

    @T.prim_func
    def program(
        N: T.Tensor((1,), "int32"), X: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")
    ):
        with T.Kernel(device=2, block=2, threads=128):
            arrived = T.alloc_flags(ROWS)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((COLUMNS,), "float32")
                box = T.alloc((1,), "int32", level="l1")
                row = T.alloc_var("int32", init=0)
                while row < ROWS:
                    if draw == "thread":
                        if T.get_thread_binding() == 0:
                            box[0] = T.atomic_add(N[0], 1, return_prev=True)
                        T.sync_threads()
                        row = box[0]
                        T.sync_threads()
                    else:
                        row = T.invoke_one(T.atomic_add(N[0], 1, return_prev=True))
                    if row < ROWS:
                        T.copy(X[row, 0], tile)
                        T.copy(tile, Y[row, 0], dst=1 - rank, signal=arrived[row])
                        T.wait(arrived[row], ">=", 1)

    return program


@pytest.mark.parametrize("draw", ["thread", "unit"])
def test_a_scheduler_runs(draw):
    program = scheduled(draw)
    per_device = [
        [torch.zeros(1, dtype=torch.int32), torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)] for _ in "ab"
    ]
    tilescale.emulate(program, per_device)
    assert torch.equal(per_device[0][2], per_device[1][1])
    assert "tilescale::wait<" in bodies(source(program))


@pytest.mark.parametrize("level", ["block", "warpgroup", "warp"])
@pytest.mark.parametrize("kind", ["if", "else", "while", "for"])
def test_what_is_uniform_over_a_unit_decides(kind, level):
    """A number from memory decides whether, and how often, units signal and wait."""

    @T.prim_func
    def program(N: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            flags = T.alloc_flags(8)
            with T.Scale(level) as (unit, _), T.Scale("device") as (rank, _):
                n = T.alloc_var("int32", init=0)
                n = N[unit % 4] + rank - rank
                if kind == "if":
                    if n > 1:
                        T.signal(flags[unit], dst=1 - rank)
                        T.wait(flags[unit], ">=", 1)
                elif kind == "else":
                    if n > 7:
                        Y[unit % 4] = 5
                    else:
                        T.signal(flags[unit], dst=1 - rank)
                        T.wait(flags[unit], ">=", 1)
                elif kind == "while":
                    while n > 0:
                        T.signal(flags[unit], dst=1 - rank)
                        n -= 1
                    T.wait(flags[unit], ">=", 2)
                else:
                    for k in T.serial(n):
                        T.signal(flags[unit], dst=1 - rank)
                        T.wait(flags[unit], ">=", k + 1)

    tilescale.emulate(
        program, [[torch.full((4,), 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)] for _ in "ab"]
    )
    assert "tilescale::signal<" in bodies(source(program))


def diverging(how):
    @T.prim_func
    def program(N: T.Tensor((128,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                t = T.alloc_var("int32", init=0)
                tx = T.get_thread_binding()
                if how == "of the thread":
                    t = N[0] + tx
                elif how == "loaded by threads":
                    t = N[tx]
                elif how == "own update":
                    t = T.atomic_add(N[0], 1, return_prev=True)
                elif how == "set under a condition":
                    if N[tx] > 2:
                        t = 1
                elif how == "a loop of its own":
                    while t < N[tx]:
                        t += 1
                if how == "left early":
                    while t < 8:
                        t += 1
                        if N[tx] == t:
                            T.loop_break()
                        T.signal(Y[0], dst=1 - rank)
                elif how == "without the first thread":
                    if tx >= 64:
                        T.signal(Y[0], dst=1 - rank)
                elif how == "operand":
                    T.signal(Y[tx % 8], dst=1 - rank)
                elif how == "loop":
                    t = N[tx]
                    while t > 0:
                        T.signal(Y[0], dst=1 - rank)
                        t -= 1
                else:
                    if t > 3:
                        T.signal(Y[0], dst=1 - rank)

    return program


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("of the thread", "condition that may differ between threads of a block: t > 3"),
        ("loaded by threads", "t > 3"),
        ("own update", "t > 3"),
        ("set under a condition", "t > 3"),
        ("a loop of its own", "t > 3"),
        ("left early", "leave in different iterations"),
        ("without the first thread", "the first thread of a block does not pass: tx >= 64"),
        ("operand", "an operand that differs between threads of a block: tx % 8"),
        ("loop", "t > 0"),
    ],
)
def test_what_differs_between_threads_is_an_error_at_the_line(how, found):
    program = diverging(how)
    arguments = [[torch.zeros(128, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)] for _ in "ab"]
    for run in (lambda: tilescale.emulate(program, arguments), lambda: lowered(program)):
        with pytest.raises(UsageError) as caught:
            run()
        assert found in str(caught.value) and "T.signal(Y" in str(caught.value)
    if how == "loaded by threads":
        assert "t is set here" in str(caught.value) and "T.invoke_one" in str(caught.value)


def polling(how):
    """A put whose receiver polls; how it does."""

    @T.prim_func
    def program(X: T.Tensor((COLUMNS,), "float32"), Y: T.Tensor((COLUMNS,), "float32")):
        with T.Kernel(device=2, block=1, threads=128):
            inbox, arrived = T.alloc((COLUMNS,), "float32", level="l2"), T.alloc_flags((2, 2))
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((COLUMNS,), "float32")
                seen, turns = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
                T.copy(X, tile)
                T.copy(tile, inbox, dst=1 - rank, signal=arrived[1, 0])
                if how == "condition":
                    while T.atomic_load(arrived[1, 0]) < 1:
                        turns += 1
                elif how == "variable":
                    while seen < 1:
                        seen = T.atomic_load(arrived[1, 0])
                elif how == "left":
                    while turns >= 0:
                        if T.atomic_load(arrived[1, 0]) > 0:
                            T.loop_break()
                        turns += 1
                elif how == "one thread":
                    if T.get_thread_binding() == 0:
                        while T.atomic_load(arrived[1, 0]) < 1:
                            turns += 1
                    T.sync_threads()
                elif how == "nested":
                    while turns < 2:
                        while T.atomic_load(arrived[1, 0]) < 1:
                            seen += 1
                        turns += 1
                elif how == "skipped":
                    while turns < 1:
                        seen = T.atomic_load(arrived[1, 0])
                        if seen < 1:
                            continue
                        turns = 1
                T.copy(inbox, tile)
                T.copy(tile, Y)

    return program


POLLING = ["condition", "variable", "left", "one thread", "nested", "skipped"]


@pytest.mark.parametrize("how", POLLING)
def test_a_loop_that_polls_ends(how):
    """In any order of the emulator, and by a bound on GPUs, where it looks at the time, and at failures of others."""
    program = polling(how)
    for seed in (None, 0, 1, 2):
        per_device = [[torch.randn(COLUMNS), torch.zeros(COLUMNS)] for _ in "ab"]
        tilescale.emulate(program, per_device, schedule_seed=seed)
        assert torch.equal(per_device[0][1], per_device[1][0])
    body = bodies(source(program))
    loops = 2 if how == "nested" else 1
    assert body.count("tilescale::iteration<") == loops and body.count("tilescale::look(") == 1
    is_alone = how == "one thread"
    assert ("tilescale::broadcast_value<" in body) == (not is_alone)  # else one thread polls for all


def test_loops_that_poll_are_compiled():
    """All in one translation unit: parsing the headers takes two or three seconds."""
    ptxas(joined([renamed(source(polling(how)), number) for number, how in enumerate(POLLING)]))


def test_a_loop_that_waits_ends_once_a_wait_has_failed():
    @T.prim_func
    def program(Y: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            flags = T.alloc_flags(2)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                n = T.alloc_var("int32", init=0)
                while Y[0] < 3:
                    n += 1
                    T.signal(flags[0], dst=1 - rank)
                    T.wait(flags[0], ">=", n)
                    Y[0] += 1

    tilescale.emulate(program, [[torch.zeros(1, dtype=torch.int32)] for _ in "ab"])
    assert "tilescale::iteration<0>" in bodies(source(program))


def rows_from_memory(kind):
    @T.prim_func
    def program(N: T.Tensor((1,), "int32"), X: T.Tensor((8, 32), "float32"), Y: T.Tensor((24, 32), "float32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8, 32), "float32")
                T.copy(X, tile)
                m = N[0]
                if kind == "put":
                    T.copy(tile, Y[m : 2 * m, 0:32], dst=1 - rank)
                elif kind == "slice":
                    T.copy(tile[0:m, 0:32], Y[m : 2 * m, 0:32], dst=1 - rank)
                elif kind == "get":
                    T.copy(X[0:m, 0:32], tile, src=1 - rank)
                    T.copy(tile, Y[8:16, 0:32])
                elif kind == "local store":
                    T.copy(tile, Y[m : 2 * m, 0:32])
                else:
                    T.copy(X[0:m, 0:32], tile)
                    T.copy(tile, Y[8:16, 0:32])

    return program


@pytest.mark.parametrize("kind", ["put", "slice", "get", "local store", "local load"])
def test_a_copy_has_as_many_rows_as_memory_says(kind):
    """All others stay as they were; on GPUs every element is guarded by the number, which the kernel is passed."""
    program = rows_from_memory(kind)
    for m in (0, 3, 8):
        per_device = [[torch.tensor([m], dtype=torch.int32), torch.randn(8, 32), torch.zeros(24, 32)] for _ in "ab"]
        wanted = torch.zeros(24, 32)
        (_, mine, got), (_, theirs, _) = per_device
        if kind in ("put", "slice", "local store"):
            wanted[m : 2 * m] = (mine if kind == "local store" else theirs)[:m]
        else:
            wanted[8:16] = mine
            wanted[8 : 8 + m] = (theirs if kind == "get" else mine)[:m]
        tilescale.emulate(program, per_device)
        assert torch.equal(got, wanted)
    body = bodies(source(program))
    assert "int m = N[0]" in body and " < m) {" in body


@pytest.mark.parametrize("kind", ["put", "slice", "local store", "get"])
def test_more_rows_than_a_tile_has_are_an_error(kind):
    arguments = [[torch.tensor([9], dtype=torch.int32), torch.zeros(8, 32), torch.zeros(24, 32)] for _ in "ab"]
    with pytest.raises(TileScaleError, match=r"tile\[0:9, 0:32\] is outside|X\[0:9"):
        tilescale.emulate(rows_from_memory(kind), arguments)
