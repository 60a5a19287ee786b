# SPDX-License-Identifier: MIT
"""Atomic additions at a peer, waits for several flags, and one thread that acts for its unit."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.peer_programs import CASES, gathered, integers, last_block, summed
from tests.emulator.support import values
from tests.halves import half_at_night
from tilescale.errors import (
    DeadlockError,
    NoDataError,
    OutOfBoundsError,
    PeerOutOfRangeError,
    PhaseError,
    RaceError,
    ShapeError,
    UsageError,
)


@pytest.mark.parametrize(("name", "devices"), half_at_night([*CASES], [1, 2, 3, 8]))
def test_programs_compute_what_they_must(name, devices):
    case = CASES[name]
    if name.endswith("_tma") and devices == 1:
        pytest.skip("no network connects one device, so it has no mechanism to ask for")
    ranks = [case.tensors(rank, devices) for rank in range(devices)]
    tilescale.emulate(case.make(devices), ranks, schedule_seed={2: 0, 3: 7}.get(devices))
    case.check(ranks)


def test_a_fetch_add_returns_the_value_to_all_threads_and_may_decide_a_branch():
    @T.prim_func
    def program(out: T.Tensor((2, 64), "int32"), counter: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=2, threads=64) as b:
            with T.Scale("block"):
                with T.Scale("device"):
                    if T.atomic_add(counter[0], 2, dst=1, return_prev=True) >= 4:
                        for i in T.Parallel(64):
                            out[b, i] = i
                    else:
                        for i in T.Parallel(64):
                            out[b, i] = -1

    args = [[integers(2, 64), integers(1)] for _ in range(2)]
    tilescale.emulate(program, args)
    rows = torch.cat([out for out, _ in args]).tolist()
    assert sorted(row[1] for row in rows) == [-1, -1, 1, 1]
    assert all(row in ([-1] * 64, list(range(64))) for row in rows)


def test_a_tile_is_clipped_at_the_end_of_the_tensor_as_a_put_is():
    @T.prim_func
    def program(Y: T.Tensor((40,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            tile = T.alloc((32,), "int32")
            T.fill(tile, 1)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                T.atomic_add(Y[32], tile, dst=1 - rank)

    args = [[integers(40)] for _ in range(2)]
    tilescale.emulate(program, args)
    assert args[0][0].tolist() == [0] * 32 + [1] * 8


def test_what_was_added_must_be_waited_for():
    def program(waits: bool):
        @T.prim_func
        def add(Y: T.Tensor((32,), "int32"), Z: T.Tensor((32,), "int32")):
            with T.Kernel(device=2, block=1, threads=32):
                arrived = T.alloc_flags(1)
                tile = T.alloc((32,), "int32")
                T.fill(tile, 5)
                with T.Scale("block"), T.Scale("device") as (rank, _):
                    T.atomic_add(Y[0:32], tile, dst=1 - rank)
                    T.signal(arrived[0], dst=1 - rank)
                    if waits:
                        T.wait(arrived[0], ">=", 1)
                T.copy(Y, Z)

        return add

    args = [[integers(32), integers(32)] for _ in range(2)]
    tilescale.emulate(program(True), args)
    assert args[1][1].tolist() == [5] * 32
    with pytest.raises(RaceError, match="atomically updates"):
        tilescale.emulate(program(False), [[integers(32), integers(32)] for _ in range(2)])


def test_an_element_and_a_plain_store_race_and_two_additions_do_not():
    @T.prim_func
    def program(X: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if rank == 0:
                    T.atomic_add(X[0], 1, dst=1)
                else:
                    X[0] = 1

    with pytest.raises(RaceError, match="atomically updates"):
        tilescale.emulate(program, [[integers(1)] for _ in range(2)])


@pytest.mark.parametrize("order", ["own first", "peer first"])
@pytest.mark.parametrize("tile", [False, True])
def test_additions_of_one_device_are_not_atomic_with_those_of_others(order, tile):
    def program(own: bool):
        @T.prim_func
        def add(X: T.Tensor((32,), "float32")):
            with T.Kernel(device=2, block=1, threads=32):
                with T.Scale("block"), T.Scale("device") as (rank, _):
                    ones = T.alloc((32,), "float32")
                    T.fill(ones, 1.0)
                    if rank == 1:
                        T.atomic_add(X[0:32], ones, dst=1)
                    elif own:
                        T.atomic_add(X[0:32], ones, dst=0)
                    elif tile:
                        T.atomic_add(X[0:32], ones)
                    else:
                        for i in T.Parallel(32):
                            T.atomic_add(X[i], 1.0)
                    if rank == 1:
                        T.atomic_add(X[0:32], ones, dst=0)

        return add

    ranks = [[torch.zeros(32)] for _ in range(2)]
    tilescale.emulate(program(True), ranks)
    assert ranks[0][0].tolist() == [2.0] * 32
    with pytest.raises(RaceError, match="atomically updates it and") as raised:
        tilescale.emulate(
            program(False), [[torch.zeros(32)] for _ in range(2)], schedule_seed=None if order == "own first" else 0
        )
    assert "dst=rank" in raised.value.hint


def test_fetch_adds_without_an_order_make_nothing_visible():
    ranks = [CASES["last_block"].tensors(rank, 3) for rank in range(3)]
    with pytest.raises(RaceError, match="parts"):
        tilescale.emulate(last_block(3, "relaxed"), ranks)


def test_a_slice_whose_last_flag_is_missing_names_its_flags():
    args = [[values(r, 32, dtype="int32"), integers(3, 32)] for r in range(3)]
    with pytest.raises(DeadlockError, match=r"arrived\[0:3\] >= 1") as raised:
        tilescale.emulate(gathered(3, forgets=True), args)
    assert "arrived[0:3] = [1, 1, 0]" in str(raised.value)


def test_a_wait_for_any_acquires_that_flags_signal_alone():
    @T.prim_func
    def program(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            inbox = T.alloc((2, 32), "int32", level="l2")
            arrived = T.alloc_flags(2)
            tile = T.alloc((32,), "int32")
            T.copy(X, tile)
            with T.Scale("block"), T.Scale("device") as (rank, size):
                for peer in T.serial(2):
                    T.copy(tile, inbox[rank, 0:32], dst=peer, signal=arrived[rank])
                found = T.wait_any(arrived[0:2], ">=", 1)
                T.copy(inbox[1 - found, 0:32], tile)
            T.copy(tile, Y)

    with pytest.raises(RaceError, match="inbox"):
        tilescale.emulate(program, [[values(r, 32, dtype="int32"), integers(32)] for r in range(2)])


def test_the_block_that_comes_last_sees_what_the_others_wrote():
    """The reduction of split-K: the counter's order makes partial sums visible to the last block."""

    def program(order: str):
        @T.prim_func
        def split_k(X: T.Tensor((4, 64), "int32"), Y: T.Tensor((64,), "int32"), done: T.Tensor((1,), "int32")):
            with T.Kernel(4, threads=64) as b:
                parts = T.alloc((4, 64), "int32", level="l2")
                for i in T.Parallel(64):
                    parts[b, i] = 2 * X[b, i]
                before = T.invoke_one(T.atomic_add(done[0], 1, memory_order=order, return_prev=True))
                if before == 3:
                    for i in T.Parallel(64):
                        Y[i] = parts[0, i] + parts[1, i] + parts[2, i] + parts[3, i]

        return split_k

    x, y = values(1, 4, 64, dtype="int32"), integers(64)
    tilescale.emulate(program("acq_rel"), [x, y, integers(1)])
    assert torch.equal(y, (2 * x).sum(0).int())
    with pytest.raises(RaceError, match="parts"):
        tilescale.emulate(program("relaxed"), [x, y, integers(1)])


# -- wrong uses --------------------------------------------------------------------------------------------------------


def wrong(use):
    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), N: T.Tensor((4,), "int32"), B: T.Tensor((64,), "int8")):
        with T.Kernel(device=2, block=1, threads=64):
            tile = T.alloc((64,), "float32")
            small = T.alloc((32,), "float32")
            narrow = T.alloc((64,), "int32")
            with T.Scale("block"), T.Scale("device") as (rank, _):
                use(X, N, B, tile, small, narrow, rank)

    return program


@pytest.mark.parametrize(
    ("error", "text", "use"),
    [
        (UsageError, "int8 has no atomic addition", lambda X, N, B, t, s, n, r: T.atomic_add(B[0], 1, dst=1 - r)),
        (UsageError, "a number is added to one element", lambda X, N, B, t, s, n, r: T.atomic_add(N, 1, dst=1 - r)),
        (UsageError, "is for an element", lambda X, N, B, t, s, n, r: T.atomic_add(X, t, dst=0, return_prev=True)),
        (UsageError, "a tile on chip", lambda X, N, B, t, s, n, r: T.atomic_add(t[0], 1.0, dst=0)),
        (UsageError, "whose elements are int32", lambda X, N, B, t, s, n, r: T.atomic_add(N[0], 1.5, dst=0)),
        (UsageError, "memory_order='x'", lambda X, N, B, t, s, n, r: T.atomic_add(N[0], 1, dst=0, memory_order="x")),
        (UsageError, "takes no annotations", lambda X, N, B, t, s, n, r: T.atomic_add(N[0], 1, dst=0, annotations={})),
        (UsageError, "converts nothing", lambda X, N, B, t, s, n, r: T.atomic_add(X, n, dst=0)),
        (UsageError, "is added by lsu or tma", lambda X, N, B, t, s, n, r: T.atomic_add(X, t, dst=0, impl="nccl")),
        (ShapeError, "different extents", lambda X, N, B, t, s, n, r: T.atomic_add(X[0:64], s[0:32], dst=0)),
        (PeerOutOfRangeError, "peer 2", lambda X, N, B, t, s, n, r: T.atomic_add(N[0], 1, dst=2)),
        (UsageError, "in T.Parallel", lambda X, N, B, t, s, n, r: _in_parallel(N)),
        (UsageError, "in T.Parallel", lambda X, N, B, t, s, n, r: _one_in_parallel(X, N)),
        (UsageError, "one thread evaluates an expression", lambda X, N, B, t, s, n, r: T.invoke_one(T.signal(N[0]))),
        (UsageError, "a slice along one dimension", lambda X, N, B, t, s, n, r: T.wait_any(N[0], ">=", 1)),
        (UsageError, "a comparison is one of", lambda X, N, B, t, s, n, r: T.wait_any(N[0:2], "=>", 1)),
        (UsageError, "is float32", lambda X, N, B, t, s, n, r: T.wait(X[0:2], ">=", 1)),
    ],
)  # fmt: skip
def test_wrong_uses_are_errors_with_their_line(error, text, use):
    with pytest.raises(error, match=text) as raised:
        tilescale.emulate(wrong(use), [[torch.zeros(64), integers(4), torch.zeros(64, dtype=torch.int8)]] * 2)
    assert any("test_peer_atomics.py" in place.file for place in raised.value.where)


@T.macro
def _in_parallel(N):
    for i in T.Parallel(4):
        N[i] = T.atomic_add(N[i], 1, dst=0, return_prev=True)


@T.macro
def _one_in_parallel(X, N):
    for i in T.Parallel(4):
        X[i] = T.invoke_one(N[i])


def test_a_device_phase_adds_nothing():
    with pytest.raises(PhaseError, match="threads of programs add"):

        @T.prim_func
        def program(N: T.Tensor((4,), "int32")):
            with T.Kernel(device=2, block=1, threads=64):
                with T.Scale("device") as (rank, _):
                    if True:
                        T.atomic_add(N[0], 1, dst=0)
                with T.Scale("block"):
                    N[0] = 1


def test_a_device_phase_waits_for_no_single_flag_of_several():
    with pytest.raises(PhaseError, match="threads of programs have its result"):

        @T.prim_func
        def program(N: T.Tensor((4,), "int32")):
            with T.Kernel(device=2, block=1, threads=64):
                with T.Scale("device") as (rank, _):
                    T.signal(N[rank], dst=1 - rank)
                    T.wait_any(N[0:4], ">=", 1)


def test_units_inside_a_device_share_its_memory():
    with pytest.raises(UsageError, match="share their device's memory"):

        @T.prim_func
        def program(N: T.Tensor((4,), "int32")):
            with T.Kernel(device=2, block=1, threads=64):
                with T.Scale("warp"):
                    T.atomic_add(N[0], 1, dst=0)


@pytest.mark.parametrize("tile", [False, True])
def test_beyond_the_tensor_is_out_of_bounds(tile):
    @T.prim_func
    def program(N: T.Tensor((32,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            ones = T.alloc((32,), "int32")
            T.fill(ones, 1)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if tile:
                    T.atomic_add(N[32 + rank * 32], ones, dst=0)
                else:
                    T.atomic_add(N[32 + rank], 1, dst=0)

    with pytest.raises(OutOfBoundsError, match=r"N\[") as raised:
        tilescale.emulate(program, [[integers(32)] for _ in range(2)])
    assert any("test_peer_atomics.py" in place.file for place in raised.value.where)


# -- time, runs without data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["l0", "l1"])
def test_additions_take_time_on_the_way_to_the_peer(level):
    here, there = (tilescale.emulate(summed(n, level=level), data=False) for n in (1, 2))
    assert there.time_us > here.time_us > 0
    assert any(span.name == "atomic add" for span in there.timeline.spans)


def test_a_run_without_data_knows_tickets_of_flags_and_no_others():
    def program(own: bool):
        @T.prim_func
        def draws(counter: T.Tensor((1,), "int32"), Y: T.Tensor((8, 64), "float32")):
            with T.Kernel(device=2, block=4, threads=64):
                flags = T.alloc_flags(1)
                tile = T.alloc((64,), "float32")
                T.clear(tile)
                with T.Scale("block"), T.Scale("device"):
                    if own:
                        T.copy(tile, Y[T.atomic_add(flags[0], 1, dst=0, return_prev=True), 0:64], dst=0)
                    else:
                        T.copy(tile, Y[T.atomic_add(counter[0], 1, dst=0, return_prev=True), 0:64], dst=0)

        return draws

    assert tilescale.emulate(program(True), data=False).time_us > 0
    with pytest.raises(NoDataError):
        tilescale.emulate(program(False), data=False)
