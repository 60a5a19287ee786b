# SPDX-License-Identifier: MIT
"""Deadlocks: cyclic waits, waits without a signal, barriers that not all units reach, units that never start."""

import torch

import tilescale.language as T
from tests.corpus.record import FAIAL, INDIGO, RMARACEBENCH, SCORD, SIMULEE, Kind, alone, each
from tilescale.errors import CollectiveNotReachedError, DeadlockError, RankMismatchError

label = Kind("deadlock")

# -- devices -----------------------------------------------------------------------------------------------------------


@label("device", RMARACEBENCH("sync: wait until"), wrong={"wait": DeadlockError}, right=["signal", "one starts"])
def ring_of_waits(first):
    """All wait first, all signal first, or one of them signals first."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("device") as (rank, size):
                if first == "signal":
                    T.signal(F[0], dst=(rank + 1) % size)
                if first == "one starts":
                    if rank == 0:
                        T.signal(F[0], dst=1)
                T.wait(F[0], ">=", 1)  # named
                if first == "wait":
                    T.signal(F[0], dst=(rank + 1) % size)
                if first == "one starts":
                    if rank > 0:
                        T.signal(F[0], dst=(rank + 1) % size)

    return program, each(4, 1)


@label("device", RMARACEBENCH("sync: several origins"), wrong={"all": DeadlockError}, right=["all but one"])
def signals_of_the_others(count):
    """Each device signals all others, but not itself."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as (rank, size):
                for step in T.serial(1, size):
                    T.signal(F[0], dst=(rank + step) % size)
                T.wait(F[0], ">=", size if count == "all" else size - 1)  # named

    return program, each(3, 1)


@label("device", RMARACEBENCH("sync: locks in another order"), wrong={"crossed": DeadlockError}, right=["in order"])
def two_flags(order):
    """Each waits for one flag before it raises the one that the other waits for; or the first one raises first."""

    @T.prim_func
    def program(F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if rank == 0:
                    if order == "in order":
                        T.signal(F[1], dst=1)
                    T.wait(F[0], ">=", 1)  # named
                    if order == "crossed":
                        T.signal(F[1], dst=1)
                else:
                    T.wait(F[1], ">=", 1)  # named
                    T.signal(F[0], dst=0)

    return program, each(2, 2)


@label(
    "device", RMARACEBENCH("sync: barrier of a part"), wrong={"on the rank": CollectiveNotReachedError}, right=["none"]
)
def barrier_under_a_condition(condition):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if condition == "none":
                    T.barrier()
                else:
                    if rank > 0:
                        T.barrier()  # named

    return program, each(3, (8,))


@label("device", RMARACEBENCH("sync: barrier of a part"), wrong={"data": DeadlockError}, right=["same data"])
def barrier_that_data_decides(condition):
    @T.prim_func
    def program(S: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device"):
                if S[0] == 0:
                    T.barrier()  # named

    args = each(3, 1)
    if condition == "data":
        args[1][0][0] = 1
    return program, args


@label("device", RMARACEBENCH("sync: collectives"), wrong={"3, 3, 2": DeadlockError}, right=["3, 3, 3"])
def rounds_of_a_collective(rounds):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device"):
                for _ in T.serial(n):
                    T.allreduce(X)  # named

    counts = [int(word) for word in rounds.split(", ")]
    return program, [[x, n] for (x,), n in zip(each(3, (8,)), counts, strict=True)]


@label("device", RMARACEBENCH("sync: collectives"), wrong={"differs": RankMismatchError}, right=["same"])
def order_of_collectives(order):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), first: T.int32):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device"):
                if first == 0:
                    T.allreduce(X)  # named
                    T.broadcast(Y)
                else:
                    T.broadcast(Y)  # named
                    T.allreduce(X)

    return program, [[*given, rank if order == "differs" else 1] for rank, given in enumerate(each(2, (8,), (8,)))]


@label("device", RMARACEBENCH("sync: completion of a put"), wrong={"behind": DeadlockError}, right=["ahead"])
def copies_in_one_queue(place):
    """A copy that waits for the effect of a later one of its queue waits for ever."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            answered, arrived = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                if place == "ahead":
                    T.copy(X, Y[1, :], dst=1 - rank, signal=answered[0])
                T.copy(X, Y[0, :], dst=1 - rank, signal=arrived[0], after=(answered[0], ">=", 1))  # named
                if place == "behind":
                    T.copy(X, Y[1, :], dst=1 - rank, signal=answered[0])
                T.wait(arrived[0], ">=", 1)

    return program, each(2, (8,), (2, 8))


@label("device", RMARACEBENCH("sync: notification that is reset"), wrong={"set": DeadlockError}, right=["add"])
def signal_that_takes_another_away(op):
    """The next device resets a raised flag before any device waits for both."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), G: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                if rank > 0:
                    T.signal(F[0], 1, op=op, dst=0)
                else:
                    T.wait(F[0], ">=", 2)  # named

    return program, each(3, 1, 1)


# -- clusters ----------------------------------------------------------------------------------------------------------


@label("cta_cluster", SIMULEE("barrier divergence"), wrong={"one stays away": DeadlockError}, right=["all come"])
def barrier_of_a_cluster(who):
    @T.prim_func
    def program(S: T.Tensor((4,), "int32")):
        with T.Kernel(cta_cluster=2, block=4, threads=32) as b:
            with T.Scale("block"):
                mine = T.alloc((1,), "int32")
                T.copy(S[b], mine)
                if mine[0] == 0:
                    T.barrier()  # named

    return program, [torch.tensor([0, 0, 0, int(who == "one stays away")], dtype=torch.int32)]


@label("cta_cluster", SIMULEE("barriers of the wrong group"), wrong={"own": DeadlockError}, right=["next"])
def arrivals_in_a_cluster(target):
    """Half of the arrivals that a block waits for are to come from its neighbour, which arrives at its own barrier."""

    @T.prim_func
    def program(Y: T.Tensor((2,), "int32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block") as (rank, _):
                here = T.alloc_cluster_barrier([64 if target == "next" else 96])
                T.barrier()
                T.mbarrier_arrive(here[0], rank)
                T.mbarrier_arrive(here[0], 1 - rank if target == "next" else rank)
                T.mbarrier_wait_parity(here[0], 0)  # named
                Y[b] = 1
                T.barrier()

    return program, alone(2)


@label("cta_cluster", FAIAL("barriers that wait for each other"), wrong={"crossed": DeadlockError}, right=["in order"])
def two_blocks_of_a_cluster(order):
    """Each waits for the other one's arrival before it arrives there."""

    @T.prim_func
    def program(Y: T.Tensor((2,), "int32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block") as (rank, _):
                here = T.alloc_cluster_barrier([32])
                T.barrier()
                if order == "in order":
                    T.mbarrier_arrive(here[0], 1 - rank)
                T.mbarrier_wait_parity(here[0], 0)  # named
                if order == "crossed":
                    T.mbarrier_arrive(here[0], 1 - rank)
                Y[b] = 1
                T.barrier()

    return program, alone(2)


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", SCORD("blocks that wait for blocks"), wrong={"300": DeadlockError}, right=["200"])
def grid_that_waits_for_itself(blocks):
    """All blocks wait for each other; the device can hold 264 of this size."""
    count = int(blocks)

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=1, block=count, threads=1024):
            with T.Scale("block"):
                T.barrier()  # named

    return program, alone(1)


@label("block", INDIGO("blocks in a chain"), wrong={"next": DeadlockError}, right=["before"])
def chain_of_blocks(neighbour):
    """Each block waits for the one before it; or for the next one, so that the last one waits for the first."""

    @T.prim_func
    def program(F: T.Tensor((4,), "int32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                if neighbour == "next":
                    T.wait(F[(b + 1) % 4], ">=", 1)  # named
                else:
                    if b > 0:
                        T.wait(F[b - 1], ">=", 1)
                T.signal(F[b])

    return program, alone(4)


@label("block", SCORD("spinning"), wrong={"nobody": DeadlockError}, right=["block 0"])
def loop_that_spins(writer):
    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), Y: T.Tensor((2,), "int32")):
        with T.Kernel(2, threads=1) as b:
            seen = T.alloc_var("int32", init=0)
            if b == 1:
                while seen == 0:  # named
                    seen = T.atomic_load(F[0], memory_order="acquire")
            else:
                if writer == "block 0":
                    T.atomic_store(F[0], 1, memory_order="release")
            Y[b] = 1

    return program, alone(1, 2)


@label("block", SIMULEE("barrier divergence"), wrong={"some": DeadlockError}, right=["all"])
def barrier_of_the_grid(who):
    @T.prim_func
    def program(Y: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32) as b:
            Y[b] = 1
            if who == "all":
                T.sync_grid()
            else:
                if b < 3:
                    T.sync_grid()  # named

    return program, alone(4)


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label("warpgroup", FAIAL("barriers of some threads"), wrong={"128 of 256": DeadlockError}, right=["128 of 128"])
def arrivals_at_an_mbarrier(count):
    """Half of the threads arrive."""
    expected = int(count.split()[-1])

    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            ready = T.alloc_barrier(expected)
            if tx < 128:
                T.barrier_arrive(ready)
            else:
                T.barrier_wait(ready, 0)  # named
            Y[tx] = 1

    return program, alone(256)


@label("warpgroup", SIMULEE("barrier divergence"), wrong={"one": DeadlockError}, right=["both"])
def named_barrier_of_a_block(who):
    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            if tx < 128:
                T.sync_threads(3, 256)  # named
            else:
                if who == "both":
                    T.sync_threads(3, 256)
            Y[tx] = 1

    return program, alone(256)


@label("warpgroup", FAIAL("barriers that wait for each other"), wrong={"crossed": DeadlockError}, right=["in order"])
def two_roles(order):
    """Each role waits for the other one's barrier before it arrives at its own."""

    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            a, b = T.alloc_barrier(128), T.alloc_barrier(128)
            if tx < 128:
                if order == "in order":
                    T.barrier_arrive(a)
                T.barrier_wait(b, 0)  # named
                if order == "crossed":
                    T.barrier_arrive(a)
            else:
                T.barrier_wait(a, 0)  # named
                T.barrier_arrive(b)
            Y[tx] = 1

    return program, alone(256)


@label("warpgroup", FAIAL("producer and consumer, in a loop"), wrong={"3": DeadlockError}, right=["4"])
def rounds_of_a_producer(rounds):
    """The consumer takes four tiles; the producer makes three or four."""
    made = int(rounds)

    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            full, taken = T.alloc_barrier(128), T.alloc_barrier(128)
            if tx < 128:
                for k in T.serial(made):
                    T.barrier_wait(taken, (k + 1) % 2)
                    T.barrier_arrive(full)
            else:
                for k in T.serial(4):
                    T.barrier_wait(full, k % 2)  # named
                    T.barrier_arrive(taken)
            Y[tx] = 1

    return program, alone(256)


@label("warpgroup", RMARACEBENCH("hybrid: order of threads"), wrong={"crossed": DeadlockError}, right=["in order"])
def warpgroups_of_two_devices(order):
    """A warpgroup waits for the peer's other one, which waits at a barrier of its block for the first."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("warpgroup") as (wg, _):
                with T.Scale("device") as (rank, _):
                    if wg == 0:
                        if order == "in order":
                            T.signal(F[0], dst=1 - rank)
                        T.wait(F[0], ">=", 1)  # named
                T.barrier()
                with T.Scale("device") as (rank, _):
                    if wg == 1:
                        if order == "crossed":
                            T.signal(F[0], dst=1 - rank)

    return program, each(2, 1)
