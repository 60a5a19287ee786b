# SPDX-License-Identifier: MIT
"""Races inside one program: warpgroups, roles and branches that share memory on chip or what a peer sent."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import SEEDS, in_every_order, line_of, race, tensors
from tilescale.backends.emulator.checks import races
from tilescale.errors import DeadlockError, RaceError

# -- warpgroups --------------------------------------------------------------------------------------------------------


def exchange(level, layer, barriers):
    """The units of a program write a part of a tile each and read their neighbour's, twice."""

    @T.prim_func
    def program(Y: T.Tensor((8, 8), "int32")):
        with T.Kernel(1, threads=256):
            slots = T.alloc((8, 8), "int32", level=layer)
            T.clear(slots)
            with T.Scale(level) as (rank, size):
                for step in T.serial(2):
                    for i in T.Parallel(8):
                        slots[rank, i] = step + i  # own part
                    if barriers > 0:
                        T.barrier()
                    for i in T.Parallel(8):
                        Y[rank, i] = slots[(rank + 1) % size, i]  # other part
                    if barriers > 1:
                        T.barrier()

    return program


def numbers():
    return [tensors(1, (64,))[0][0].reshape(8, 8)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layer", ["l0", "l1"])
@pytest.mark.parametrize("level", ["warp", "warpgroup"])
@pytest.mark.parametrize("barriers", [0, 1])
def test_units_that_share_a_tile(level, layer, barriers, seed):
    """With one barrier the first round is right, and the second overwrites what others still read."""
    error = race(exchange(level, layer, barriers), numbers(), "own part", "other part", seed=seed)
    assert "slots[" in error.message and f", {level} " in error.message
    assert f'T.barrier() in T.Scale("{level}"), or T.barrier_arrive(b) after the one' in error.hint


@pytest.mark.parametrize("layer", ["l0", "l1"])
@pytest.mark.parametrize("level", ["warp", "warpgroup"])
def test_units_with_barriers_are_silent(level, layer):
    in_every_order(exchange(level, layer, 2), numbers)


def test_the_end_of_a_region_orders():
    """Units of one region come after those of the region before, and after the statements between."""

    @T.prim_func
    def program(Y: T.Tensor((8, 8), "int32")):
        with T.Kernel(1, threads=256):
            slots = T.alloc((8, 8), "int32")
            with T.Scale("warp") as (rank, _):
                T.fill(slots[rank, 0:8], rank)
            with T.Scale("warp") as (rank, size):
                T.copy(slots[(rank + 1) % size, 0:8], Y[rank, 0:8])
            T.fill(slots, 7)
            with T.Scale("warpgroup") as (rank, _):
                T.fill(slots[rank, 0:8], rank)
            T.copy(slots, Y)

    in_every_order(program, numbers)


def test_units_that_copy_to_each_other():
    def program(barrier):
        @T.prim_func
        def program(Y: T.Tensor((2, 8), "int32")):
            with T.Kernel(1, threads=256):
                with T.Scale("warpgroup") as (rank, size):
                    mine = T.alloc((8,), "int32", level="l0")
                    theirs = T.alloc((8,), "int32", level="l0")
                    T.fill(mine, rank)
                    T.copy(mine, theirs, dst=(rank + 1) % size)  # handed over
                    if barrier:
                        T.barrier()
                    T.copy(theirs, Y[rank, 0])  # taken

        return program

    def args():
        return [tensors(1, (16,))[0][0].reshape(2, 8)]

    error = race(program(False), args(), "handed over", "taken", seed=0)
    assert error.message.startswith("theirs[0:8] of device 0, block 0, warpgroup ")
    in_every_order(program(True), args)


# -- roles -------------------------------------------------------------------------------------------------------------


def pipeline(stages, slots, full=True, empty=True):
    """A warpgroup fills a ring of `slots` tiles, up to `stages` ahead of another one that reads them."""

    @T.prim_func
    def program(X: T.Tensor((6, 16), "float32"), Y: T.Tensor((6, 16), "float32")):
        with T.Kernel(1, threads=256):
            ring = T.alloc_shared((slots, 16), "float32")
            filled = T.alloc_barrier([128] * stages)
            emptied = T.alloc_barrier([128] * stages)
            tx = T.get_thread_binding()
            if tx < 128:
                for k in T.serial(6):
                    if empty:
                        T.barrier_wait(emptied[k % stages], k // stages % 2 ^ 1)
                    T.copy(X[k, 0], ring[k % slots, 0:16])  # producer
                    T.barrier_arrive(filled[k % stages])
            else:
                for k in T.serial(6):
                    if full:
                        T.barrier_wait(filled[k % stages], k // stages % 2)
                    T.copy(ring[k % slots, 0:16], Y[k, 0])  # consumer
                    T.barrier_arrive(emptied[k % stages])

    return program


@pytest.mark.parametrize(
    ("stages", "slots", "full", "empty"),
    [(2, 2, False, True), (2, 2, True, False), (2, 1, True, True), (3, 2, True, True), (1, 1, True, False)],
    ids=["no wait for data", "no wait for room", "one tile for two", "one buffer too few", "single"],
)
def test_producer_and_consumer(stages, slots, full, empty):
    """A role that runs ahead of a wait that is missing may go twice round a barrier: a later wait then never ends."""
    found = []
    for seed in (*SEEDS, 3, 4):
        with pytest.raises((RaceError, DeadlockError)) as caught:
            tilescale.emulate(
                pipeline(stages, slots, full, empty), tensors(1, (6, 16), (6, 16))[0], check="races", schedule_seed=seed
            )
        found.append(caught.value)
    raced = [error for error in found if isinstance(error, RaceError)]
    assert raced and (len(raced) == len(found) or not (full and empty))
    for error in raced:
        assert {w.line for w in error.where} == {line_of("producer"), line_of("consumer")}
        assert "device 0, block 0, threads 0..127 writes it" in error.message
        assert "device 0, block 0, threads 128..255 reads it" in error.message
        assert "T.barrier_arrive(b) after the one and T.barrier_wait(b) before the other" in error.hint


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_producer_and_consumer_in_step_are_silent(stages):
    in_every_order(pipeline(stages, stages), lambda: tensors(1, (6, 16), (6, 16))[0])


def test_a_wait_may_end_by_an_earlier_phase_of_the_same_parity():
    """Though it ends by the third phase where the other role has run first."""

    @T.prim_func
    def program(X: T.Tensor((1, 16), "float32"), Y: T.Tensor((1, 16), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((1, 16), "float32")
            filled = T.alloc_barrier([128])
            if T.get_thread_binding() < 128:
                T.barrier_arrive(filled[0])
                T.barrier_arrive(filled[0])
                T.copy(X, tile)  # in the third phase
                T.barrier_arrive(filled[0])
            else:
                T.barrier_wait(filled[0], 0)
                T.copy(tile, Y)  # after the first or the third

    for seed in SEEDS:
        race(program, tensors(1, (1, 16), (1, 16))[0], "in the third phase", "after the first or the third", seed=seed)


def named(arrive, number):
    @T.prim_func
    def program(X: T.Tensor((2, 128), "float32"), Y: T.Tensor((2, 128), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((128,), "float32")
            if tx < 128:
                T.sync_threads(8, 256)
                Y[0, tx] = tile[tx]  # after the barrier
            else:
                if arrive == "early":
                    T.named_barrier_arrive(number, 256)
                tile[tx - 128] = X[1, tx - 128]  # before the barrier
                if arrive == "late":
                    T.named_barrier_arrive(number, 256)

    return program


def test_named_barriers():
    race(named("early", 8), tensors(1, (2, 128), (2, 128))[0], "after the barrier", "before the barrier")
    in_every_order(named("late", 8), lambda: tensors(1, (2, 128), (2, 128))[0])


# -- one role waits, another reads -------------------------------------------------------------------------------------


def delegated(order, devices):
    """The first warpgroup waits for what a neighbour sends; the second one reads it."""

    @T.prim_func
    def program(Y: T.Tensor((32, 8), "float32"), Z: T.Tensor((32, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=1, threads=256):
            tile = T.alloc((32, 8), "float32")
            T.clear(tile)
            with T.Scale("block"):
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y, dst=(rank + 1) % size, signal=F[0])  # sent
            with T.Scale("warpgroup") as (wg, _):
                if wg == 0:
                    T.wait(F[0], ">=", 1)
                if order == "barrier":
                    T.barrier()
                if wg == 1:
                    if order == "own wait":
                        T.wait(F[0], ">=", 1)
                    for i, j in T.Parallel(32, 8):
                        Z[i, j] = Y[i, j]  # read by another role

    return program


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_wait_in_one_role_while_another_reads(devices, seed):
    args = tensors(devices, (32, 8), (32, 8), (1,))
    error = race(delegated(None, devices), args, "sent", "read by another role", seed=seed)
    assert ", warpgroup 1 reads it" in error.message


@pytest.mark.parametrize("order", ["barrier", "own wait"])
@pytest.mark.parametrize("devices", [2, 4])
def test_a_wait_that_reaches_the_reader(devices, order):
    in_every_order(delegated(order, devices), lambda: tensors(devices, (32, 8), (32, 8), (1,)))


def test_branches_that_follow_one_another_are_in_step():
    """TileLang puts a barrier between statements of different threads where the later one needs the earlier one."""

    @T.prim_func
    def program(X: T.Tensor((2, 32), "float32"), Y: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((32,), "float32")
            with T.ws(0):
                T.copy(X[0, 0], tile)
            with T.ws(1):
                T.copy(tile, Y[0, 0])
                T.copy(X[1, 0], tile)
            with T.ws(0):
                T.copy(tile, Y[1, 0])

    in_every_order(program, lambda: tensors(1, (2, 32), (2, 32))[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("between", [None, "sync"])
def test_a_branch_that_waits_orders_nothing_for_the_next(between, seed):
    """Whether or not the signal has arrived before the poll."""

    @T.prim_func
    def program(X: T.Tensor((32, 8), "float32"), Y: T.Tensor((32, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"):
                tile = T.alloc_shared((32, 8), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y, dst=1 - rank, signal=F[0])  # sent by the other one
                tx = T.get_thread_binding()
                if tx < 128:
                    T.wait(F[0], ">=", 1)
                if between == "sync":
                    T.sync_threads()
                if tx >= 128:
                    T.copy(Y, tile)  # read by other threads

    args = tensors(2, (32, 8), (32, 8), (1,))
    if between == "sync":
        tilescale.emulate(program, args, schedule_seed=seed)
    else:
        error = race(program, args, "sent by the other one", "read by other threads", seed=seed)
        assert ", threads 128..255 reads it" in error.message


def test_what_only_one_task_reaches_costs_nothing():
    """A program's own tiles are looked at only where parts of it run side by side."""
    seen = []

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8,), "float32")
            T.clear(tile)
            T.copy(tile, Y)

    class Counting(races.Table):
        def after(self, number, access):
            seen.append(access.home.name)
            return super().after(number, access)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(races, "Table", Counting)
        tilescale.emulate(program, [torch.zeros(8)])
    assert seen == ["Y"]
