# SPDX-License-Identifier: MIT
"""Waits that are never satisfied: the run ends with the waiting units, the flags' values, lines, and missing units."""

import inspect
import re

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import blank, check_alive
from tilescale.errors import DeadlockError


def flags(n=1):
    return torch.zeros(n, dtype=torch.int32)


def line_of(marker):
    """File and line of a comment in this module."""
    lines, _ = inspect.getsourcelines(inspect.getmodule(line_of))
    (number,) = [i for i, text in enumerate(lines, start=1) if text.rstrip().endswith(f"# {marker}")]
    return f"{__file__}:{number}"


def deadlock(program, args, *marks, machine=None):
    """Text of the deadlock in which a run ends; it names the marked lines, and no state is left."""
    with pytest.raises(DeadlockError) as caught:
        tilescale.emulate(program, args, machine=machine)
    text = str(caught.value)
    for mark in marks:
        assert line_of(mark) in text
    check_alive()
    return text


def test_no_statement_signals_the_flag():
    @T.prim_func
    def program(F: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=3, threads=32) as b:
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    if rank == 1 and b == 2:
                        T.wait(F[b + 1], ">=", 5)  # never

    text = deadlock(program, [[flags(4)], [flags(4)]], "never")
    assert "device 1, block 2 waits for F[3] >= 5" in text
    assert "F[3] = 0" in text
    assert "no statement of the program signals it" in text
    assert "device 0" in text and "ended" in text


def test_one_rank_signals_the_wrong_flag():
    @T.prim_func
    def program(F: T.Tensor((4,), "int32")):
        with T.Kernel(device=3, threads=32):
            with T.Scale("device") as (rank, size):
                T.signal(F[T.if_then_else(rank == 1, 3, rank)], dst=0)  # wrong flag
                if rank == 0:
                    for source in T.serial(size):
                        T.wait(F[source], ">=", 1)  # all of them

    text = deadlock(program, [[flags(4)] for _ in range(3)], "all of them")
    assert "device 0 waits for F[1] >= 1" in text
    assert "no unit has signalled it" in text
    assert line_of("wrong flag") in text


def test_too_few_signals():
    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), skip: T.int32):
        with T.Kernel(device=4, threads=32):
            with T.Scale("device") as (rank, size):
                if rank != skip:
                    T.signal(F[0], dst=0)  # three of four
                if rank == 0:
                    T.wait(F[0], ">=", size)  # four

    text = deadlock(program, [[flags(), 2] for _ in range(4)], "four")
    assert "device 0 waits for F[0] >= 4" in text and "F[0] = 3" in text
    assert "signalled so far by device 0; device 1; device 3; not by device 2" in text
    assert line_of("three of four") in text


def test_a_barrier_that_one_rank_skips_at_run_time():
    @T.prim_func
    def program(X: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, threads=32):
            with T.Scale("device"):
                if X[0] == 0:
                    T.barrier()  # not rank 2

    args = [[torch.tensor([int(r == 2)], dtype=torch.int32)] for r in range(4)]
    text = deadlock(program, args, "not rank 2")
    assert "device 0; device 1; device 3 wait for T.barrier of level 'device'" in text
    assert "3 of 4 units are there" in text
    assert "device 2 did not reach it" in text


def test_ranks_that_wait_for_each_other():
    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                T.wait(F[0], ">", 0)  # first
                T.signal(F[0], dst=1 - rank)  # then

    text = deadlock(program, [[flags()], [flags()]], "first", "then")
    assert "device 0; device 1 wait for F[0] > 0" in text


def test_an_mbarrier_that_half_the_threads_arrive_at():
    @T.prim_func
    def program(X: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            ready = T.alloc_barrier([64, 64])
            if tx < 32:
                T.barrier_arrive(ready[1])
            T.barrier_wait(ready[1], 0)  # half

    text = deadlock(program, [flags()], "half")
    assert re.search(r"block 0 waits for barrier ready\[1\], phase parity 0", text)
    assert "32 of 64 arrivals" in text


def test_a_producer_makes_one_step_less_than_the_consumer_takes():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            full = T.alloc_barrier(128)
            if tx < 128:
                for _ in T.serial(3):
                    T.barrier_arrive(full)
            else:
                for k in T.serial(4):
                    T.barrier_wait(full, k & 1)  # fourth

    text = deadlock(program, [blank(4)], "fourth")
    assert "threads 128..255 waits for barrier full[0], phase parity 1" in text
    assert "0 of 128 arrivals in phase 3" in text


def test_a_grid_of_waiters_larger_than_the_device():
    """The last program would raise the flag, but never becomes resident: the report says how many are."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(300, threads=1024) as b:
            if b == 299:
                T.signal(F[0])
            T.wait(F[0], ">=", 1)  # spinning blocks

    text = deadlock(program, [flags()], "spinning blocks")
    assert "holds 264 blocks at once; 36 of 300 have not started" in text
    assert "launch at most 264" in text


ORDERS = (None, 0, 1, 2, 3)
"""Its own, the adversarial, and random ones."""


@pytest.fixture
def small(tmp_path):
    """A machine of four SMs."""
    described = tmp_path / "small.yaml"
    described.write_text("extends: h200-sxm-8\ntitle: small\nlevels: {block: {count: 4}}\n")
    return str(described)


def waits_for_neighbours(towards: int, in_order: bool):
    """Each of 12 programs, of which 8 are resident, waits for the previous one, or with 1 for the next one."""

    @T.prim_func
    def program(F: T.Tensor((14,), "int32")):
        with T.Kernel(12, threads=1024, in_order=in_order) as b:
            if b + towards >= 0 and b + towards < 12:
                T.wait(F[b + towards + 1], ">=", 1)
            T.signal(F[b + 1])

    return program


def test_programs_that_wait_for_lower_numbers_get_on_in_any_order_if_they_say_so(small):
    for seed in ORDERS:
        tilescale.emulate(waits_for_neighbours(-1, True), [flags(14)], machine=small, schedule_seed=seed)


@pytest.mark.parametrize(("towards", "in_order"), [(-1, False), (1, True)])
def test_programs_that_say_nothing_or_wait_for_higher_numbers_deadlock(small, towards: int, in_order: bool):
    with pytest.raises(DeadlockError, match="holds 8 blocks at once; 4 of 12 have not started"):
        tilescale.emulate(waits_for_neighbours(towards, in_order), [flags(14)], machine=small, schedule_seed=0)


def test_collectives_on_tiles_get_on_in_any_order(small):
    """They guarantee progress for grids of any size, so their programs start in order, with or without the launch's
    option.
    """

    @T.prim_func
    def program(X: T.Tensor((12, 4), "float32")):
        with T.Kernel(device=2, block=12, threads=1024) as b:
            x = T.alloc((1, 4), "float32", level="l1")
            T.copy(X[b, 0], x)
            with T.Scale("block"), T.Scale("device"):
                T.allreduce(x)
            T.copy(x, X[b, 0])

    for seed in ORDERS:
        args = [[torch.ones(12, 4)] for _ in range(2)]
        tilescale.emulate(program, args, machine=small, schedule_seed=seed)
        assert all((x == 2).all() for (x,) in args)


def test_a_grid_barrier_larger_than_the_device():
    @T.prim_func
    def program(X: T.Tensor((1,), "int32")):
        with T.Kernel(140, threads=1024) as _:
            big = T.alloc_shared((1024, 50), "float32")
            T.clear(big)
            with T.Scale("block"):
                T.barrier()  # of the grid

    text = deadlock(program, [flags()], "of the grid")
    assert "132 of 140 units are there" in text
    assert "block of rank 132, 133, 134, 135, 136, 137, 138, 139 did not reach it" in text
    assert "holds 132 blocks at once" in text


def test_a_loop_that_spins_on_memory_nobody_writes():
    @T.prim_func
    def program(F: T.Tensor((3,), "int32")):
        with T.Kernel(2, threads=32) as b:
            while F[b + 1] == 0:  # spins
                T.evaluate(0)

    text = deadlock(program, [flags(3)], "spins")
    assert "F[b + 1]" in text.replace("F[bx + 1]", "F[b + 1]")
    assert "= 0" in text


def test_a_loop_that_polls_with_an_atomic():
    """Adding zero is not a write: the loop does not count as progress."""

    @T.prim_func
    def program(F: T.Tensor((3,), "int32")):
        with T.Kernel(2, threads=32) as b:
            seen = T.alloc_var("int32")
            seen = 0
            while seen == 0:  # polls
                seen = T.atomic_add(F[b], 0, return_prev=True)

    assert "F[b] = 0" in deadlock(program, [flags(3)], "polls").replace("[bx]", "[b]")


def test_loops_that_spin_and_write_are_given_up(monkeypatch):
    """Each poll writes: memory changes, yet no unit proceeds."""
    monkeypatch.setattr("tilescale.backends.emulator.execute.scheduler.PATIENCE", 500)

    @T.prim_func
    def program(F: T.Tensor((3,), "int32")):
        with T.Kernel(2, threads=1) as b:
            while F[0] == 0:  # counts its looks
                F[1 + b] += 1

    text = deadlock(program, [flags(3)], "counts its looks")
    assert "F[0] = 0" in text


@pytest.mark.parametrize("limit", ["PATIENCE", "STILL"])
def test_all_that_spin_are_named_with_their_lines(monkeypatch, limit):
    """If either is given up, the others wait as well."""
    monkeypatch.setattr(f"tilescale.backends.emulator.execute.scheduler.{limit}", 50)

    @T.prim_func
    def program(F: T.Tensor((5,), "int32")):
        with T.Kernel(3, threads=1) as b:
            if b == 0:
                while F[0] == 0:  # the first one's loop
                    F[2] += 1
            elif b == 1:
                while F[1] == 0:  # the second one's loop
                    F[3] += 1
            else:
                while F[4] == 0:  # the third one's loop, which only looks
                    T.evaluate(0)

    text = deadlock(program, [flags(5)], "the first one's loop")
    assert "3 units wait and no unit can make progress" in text
    assert "the second one's loop" in text and "the third one's loop" in text
    assert all(f"F[{place}] = 0" in text for place in (0, 1, 4))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_loop_that_stands_still_is_given_up_soon_one_that_counts_is_not(monkeypatch, seed):
    """Both write at each poll. One depends on a value that never changes, the other ends."""
    monkeypatch.setattr("tilescale.backends.emulator.execute.scheduler.STILL", 50)

    def program(n):
        @T.prim_func
        def counts(F: T.Tensor((3,), "int32")):
            with T.Kernel(2, threads=1) as b:
                while F[b] < n:  # counts to n
                    F[b] += 1
                while F[2] > 0:  # for ever
                    F[b] += 1

        return counts

    ends = flags(3)
    tilescale.emulate(program(400), [ends], schedule_seed=seed)
    assert ends.tolist() == [400, 400, 0]
    stuck = flags(3)
    stuck[2] = 1
    assert "F[2] = 1" in deadlock(program(1), [stuck], "for ever")


def test_a_named_barrier_with_too_few_threads():
    @T.prim_func
    def program(X: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            if tx < 32:
                T.sync_threads(3, 64)  # only a warp
            else:
                T.named_barrier_arrive(4, 64)

    text = deadlock(program, [flags()], "only a warp")
    assert "threads 0..31 waits for named barrier 3" in text and "32 of 64 threads" in text


def test_a_program_of_a_cluster_stays_away():
    @T.prim_func
    def program(X: T.Tensor((4,), "int32")):
        with T.Kernel(cta_cluster=2, block=4, threads=32) as b:
            with T.Scale("block"):
                away = T.alloc((1,), "int32")
                T.copy(X[b], away)
                if away[0] == 0:
                    T.barrier()  # in the cluster

    text = deadlock(program, [torch.tensor([0, 0, 0, 1], dtype=torch.int32)], "in the cluster")
    assert "cta_cluster 1" in text and "block of rank 1 did not reach it" in text


def test_a_collective_that_a_finished_device_misses():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device"):
                for _ in T.serial(n):
                    T.allreduce(X)  # n times

    text = deadlock(program, [[torch.zeros(4), 2], [torch.zeros(4), 3]], "n times")
    assert "device 1 waits for T.allreduce of level 'device'" in text
    assert "device 0 did not reach it" in text and "device 0 ended" in text


@pytest.mark.parametrize("iterations", [64, 128, 256])
def test_the_grids_barrier_in_a_parallel_loop_is_for_whole_blocks(iterations):
    """Threads without an iteration are at the loop's end, and threads with two of them come twice."""

    @T.prim_func
    def program(X: T.Tensor((4, iterations), "int32"), Y: T.Tensor((4, iterations), "int32")):
        with T.Kernel(4, threads=128) as b:
            for i in T.Parallel(iterations):
                X[b, i] = b
                T.sync_grid()
                Y[b, i] = X[3 - b, i]

    args = [blank(4, iterations, dtype="int32") for _ in range(2)]
    tilescale.emulate(program, args)
    assert args[1][:, 0].tolist() == args[1][:, -1].tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_loop_that_waits_in_its_iterations_is_no_endless_one(seed):
    """It reads memory, and what changes are its variables."""

    @T.prim_func
    def program(N: T.Tensor((1,), "int32"), F: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                step = T.alloc_var("int32", init=0)
                while step < N[0]:
                    if rank == 1:
                        T.signal(F[step], dst=0)
                    else:
                        T.wait(F[step], ">=", 1)
                    step += 1

    arguments = [[torch.full((1,), 8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)] for _ in range(2)]
    tilescale.emulate(program, arguments, schedule_seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_wait_that_hangs_in_a_loop_is_named(seed):
    @T.prim_func
    def program(N: T.Tensor((1,), "int32"), F: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                step = T.alloc_var("int32", init=0)
                while step < N[0]:
                    if rank == 1:
                        if step != 5:
                            T.signal(F[step], dst=0)
                    else:
                        T.wait(F[step], ">=", 1)  # hangs
                    step += 1

    arguments = [[torch.full((1,), 8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)] for _ in range(2)]
    with pytest.raises(DeadlockError) as caught:
        tilescale.emulate(program, arguments, schedule_seed=seed)
    text = str(caught.value)
    assert "# hangs" in text and "F[5] >= 1" in text and "1 unit" in text and "loop" not in text


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_flag_that_is_polled_in_vain_is_named(seed):
    @T.prim_func
    def program(N: T.Tensor((1,), "int32"), F: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                seen, looks = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
                while seen < 2:
                    seen = T.atomic_load(F[3])
                    looks += N[0]

    arguments = [[torch.full((1,), 1, dtype=torch.int32), torch.ones(8, dtype=torch.int32)] for _ in range(2)]
    with pytest.raises(DeadlockError) as caught:
        tilescale.emulate(program, arguments, schedule_seed=seed)
    text = str(caught.value)
    assert "F[3], which its loop polls, while seen < 2" in text and "F[3] = 1" in text
