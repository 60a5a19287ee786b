# SPDX-License-Identifier: MIT
"""Missing signals, and signals before the data that they cover."""

import tilescale.language as T
from tests.corpus.record import FAIAL, HIRACE, INDIGO, RMARACEBENCH, SCORD, TOO_EARLY, Kind, alone, each
from tilescale.errors import DeadlockError, RaceError

label = Kind("missing or early signal")

# -- devices -----------------------------------------------------------------------------------------------------------


@label(
    "device",
    RMARACEBENCH("sync: put with signal"),
    wrong=dict.fromkeys(["no wait", "signal first", "wait for nothing", "wait after the read"], RaceError),
    right=["signal after", "put with signal"],
)
def put_to_the_neighbour(order):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    if order == "signal first":
                        T.signal(F[0], dst=(rank + 1) % size)
                    if order == "put with signal":
                        T.copy(tile, Y, dst=(rank + 1) % size, signal=F[0])
                    else:
                        T.copy(tile, Y, dst=(rank + 1) % size)  # named
                    if order not in ("signal first", "put with signal"):
                        T.signal(F[0], dst=(rank + 1) % size)
                if order == "wait for nothing":
                    T.wait(F[0], ">=", 0)
                if order in ("signal first", "signal after", "put with signal"):
                    T.wait(F[0], ">=", 1)
                T.copy(Y, X)  # named
                if order == "wait after the read":
                    T.wait(F[0], ">=", 1)

    return program, each(3, (8,), (8,), 1)


@label("device", RMARACEBENCH("sync: wait until"), wrong=DeadlockError)
def put_that_nobody_speaks_of():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    T.copy(X, Y, dst=1 - rank)
                T.wait(F[0], ">=", 1)  # named
                T.copy(Y, X)

    return program, each(2, (8,), (8,), 1)


@label("device", RMARACEBENCH("sync: fence between puts"), wrong={"between": RaceError}, right=["last"])
def two_puts_and_a_signal(place):
    """The signal covers the first half only, if it is between the two."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile[0:4], Y[0:4], dst=1 - rank)
                    if place == "between":
                        T.signal(F[0], dst=1 - rank)
                    T.copy(tile[4:8], Y[4:8], dst=1 - rank)  # named
                    if place == "last":
                        T.signal(F[0], dst=1 - rank)
                T.wait(F[0], ">=", 1)
                T.copy(Y, X)  # named

    return program, each(2, (8,), (8,), 1)


@label("device", RMARACEBENCH("sync: two origins"), wrong={"of one": RaceError}, right=["of both"])
def two_senders(count):
    """Both send a part to the third device; one sends no signal."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if rank < 2:
                    T.copy(X, Y[rank, 0:8], dst=2)  # named
                    if count == "of both":
                        T.signal(F[0], dst=2)
                    else:
                        if rank == 0:
                            T.signal(F[0], dst=2)
                else:
                    T.wait(F[0], ">=", 2 if count == "of both" else 1)
                    T.copy(Y[1, 0:8], X)  # named

    return program, each(3, (8,), (2, 8), 1)


@label("device", RMARACEBENCH("sync: a third process"), wrong={"before": RaceError}, right=["after"])
def relay(place):
    """The middle device forwards the first one's signal: before it has acquired the data, or after."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.clear(tile)
                with T.Scale("device") as (rank, _):
                    if rank == 0:
                        T.copy(tile, X, dst=2, signal=None)  # named
                        T.signal(F[0], dst=1)
                    if rank == 1:
                        if place == "before":
                            T.signal(F[0], dst=2)
                        T.wait(F[0], ">=", 1)
                        if place == "after":
                            T.signal(F[0], dst=2)
                    if rank == 2:
                        T.wait(F[0], ">=", 1)
                        T.copy(X, tile)  # named

    return program, each(3, (8,), 1)


@label("device", RMARACEBENCH("sync: completion of a put"), wrong={"at the start": RaceError}, right=["with the copy"])
def signal_of_a_started_copy(place):
    """The start of a copy is not its end: only its signal marks the arrival."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), Z: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived, told = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0])  # named
                T.signal(told[0], dst=1 - rank)
            with T.Scale("block"):
                if place == "at the start":
                    T.wait(told[0], ">=", 1)
                else:
                    T.wait(arrived[0], ">=", 1)
                T.copy(Y, Z)  # named

    return program, each(2, (8,), (8,), (8,))


@label("device", RMARACEBENCH("sync: completion at the origin"), wrong={"arrival": RaceError}, right=["answer"])
def source_after_a_started_copy(known):
    """The arrival of the peer's data does not imply that the local data has left."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived, taken = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0])  # named
                T.wait(arrived[0], ">=", 1)
                T.signal(taken[0], dst=1 - rank)
                if known == "answer":
                    T.wait(taken[0], ">=", 1)
            with T.Scale("block"):
                T.clear(X)  # named

    return program, each(2, (8,), (8,))


@label("device", RMARACEBENCH("sync: blocks that feed a put"), wrong={"first": RaceError}, right=["last"])
def blocks_feed_a_copy(place):
    """The copy waits for four blocks; each counts itself before it has written its row, or after."""

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            done, arrived = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0], after=(done[0], ">=", 4))  # named
            with T.Scale("block"):
                if place == "first":
                    T.signal(done[0])
                T.fill(X[b, 0:8], b)  # named
                if place == "last":
                    T.signal(done[0])

    return program, each(2, (4, 8), (4, 8))


# -- clusters ----------------------------------------------------------------------------------------------------------


@label(
    "cta_cluster",
    HIRACE("shared memory, groups of blocks"),
    wrong={"no wait": TOO_EARLY, "arrives first": TOO_EARLY},
    right=["arrives after"],
)
def arrival_at_the_next_block(order):
    """A block copies into the next one's shared memory and arrives at a barrier there."""

    @T.prim_func
    def program(Y: T.Tensor((2, 32), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((32,), "float32")
                box = T.alloc((32,), "float32")
                here = T.alloc_cluster_barrier([32])
                T.fill(mine, rank)
                T.barrier()
                if order == "arrives first":
                    T.mbarrier_arrive(here[0], 1 - T.block_rank_in_cluster())
                T.copy(mine, box, dst=1 - rank)
                if order != "arrives first":
                    T.mbarrier_arrive(here[0], 1 - T.block_rank_in_cluster())
                if order != "no wait":
                    T.mbarrier_wait_parity(here[0], 0)
                T.copy(box, Y[b, 0])  # named
                T.barrier()

    return program, alone((2, 32))


@label("cta_cluster", HIRACE("shared memory, groups of blocks"), wrong={"no wait": TOO_EARLY}, right=["wait"])
def copy_with_a_barrier_at_its_end(order):
    """TileLang's copy within a cluster arrives at a barrier of the receiver."""

    @T.prim_func
    def program(X: T.Tensor((4, 32), "float32"), Y: T.Tensor((4, 32), "float32")):
        with T.Kernel(4, threads=32, cluster_dims=4) as b:
            own = T.alloc_shared((32,), "float32")
            other = T.alloc_shared((32,), "float32")
            arrived = T.alloc_cluster_barrier([1])
            T.copy(X[b, 0], own)
            T.cluster_sync()
            T.copy_cluster(own, other, dst_block=(b + 1) % 4, remote_barrier=arrived[0])
            if order == "wait":
                T.mbarrier_wait_parity(arrived[0], 0)
            T.copy(other, Y[b, 0])  # named
            T.cluster_sync()

    return program, alone((4, 32), (4, 32))


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", INDIGO("flags between blocks"), wrong={"early": RaceError, "no wait": RaceError}, right=["after"])
def producer_block(order):
    """The first block makes a row that all others read."""

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32"), Z: T.Tensor((4, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                if b == 0:
                    if order == "early":
                        T.signal(F[0])
                    T.fill(Y, 3)  # named
                    if order != "early":
                        T.signal(F[0])
                else:
                    if order != "no wait":
                        T.wait(F[0], ">=", 1)
                    T.copy(Y, Z[b, 0])  # named

    return program, alone((8,), (4, 8), 1)


@label("block", SCORD("missing synchronisation between blocks"), wrong=DeadlockError)
def block_that_nobody_tells():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32"), F: T.Tensor((4,), "int32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                T.fill(Y[b, 0:8], b)
                if b < 2:
                    T.signal(F[b])
                T.wait(F[(b + 1) % 4], ">=", 1)  # named

    return program, alone((4, 8), 4)


@label("block", INDIGO("last block adds up"), wrong={"before": RaceError}, right=["after"])
def partial_sums(place):
    """Each block counts itself; the first one adds up when all have counted."""

    @T.prim_func
    def program(P: T.Tensor((4,), "int32"), C: T.Tensor((1,), "int32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(device=1, block=4, threads=1) as b:
            with T.Scale("block"):
                total = T.alloc_var("int32", init=0)
                if place == "before":
                    T.signal(C[0])
                P[b] = b  # named
                if place == "after":
                    T.signal(C[0])
                if b == 0:
                    T.wait(C[0], ">=", 4)
                    for i in T.serial(4):
                        total = total + P[i]  # named
                    Y[0] = total

    return program, alone(4, 1, 1)


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label(
    "warpgroup",
    FAIAL("producer and consumer"),
    wrong={"no wait": TOO_EARLY, "arrives first": TOO_EARLY, "no arrival": DeadlockError},
    right=["arrives after"],
)
def tile_from_the_producer(order):
    """One half of the threads fills a tile, the other one reads it; an mbarrier is between them."""

    @T.prim_func
    def program(X: T.Tensor((16,), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((16,), "float32")
            full = T.alloc_barrier(128)
            tx = T.get_thread_binding()
            if tx < 128:
                if order == "arrives first":
                    T.barrier_arrive(full)
                T.copy(X, tile)
                if order in ("no wait", "arrives after"):
                    T.barrier_arrive(full)
            else:
                if order != "no wait":
                    T.barrier_wait(full, 0)  # named: no arrival
                T.copy(tile, Y)  # named: no wait, arrives first

    return program, alone((16,), (16,))


@label(
    "warpgroup", FAIAL("named barriers"), wrong={"early": RaceError, "none": DeadlockError}, right=["late"]
)  # fmt: skip
def arrival_at_a_named_barrier(order):
    @T.prim_func
    def program(X: T.Tensor((128,), "float32"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((128,), "float32")
            if tx < 128:
                T.sync_threads(8, 256)  # named: none
                Y[tx] = tile[tx]  # named: early
            else:
                if order == "early":
                    T.named_barrier_arrive(8, 256)
                tile[tx - 128] = X[tx - 128]  # named: early
                if order == "late":
                    T.named_barrier_arrive(8, 256)

    return program, alone((128,), (128,))


@label(
    "warpgroup", RMARACEBENCH("hybrid: one thread waits"), wrong={"other": RaceError}, right=["same", "other, barrier"]
)
def who_waits_for_a_peer(waits):
    """One warpgroup waits for the neighbour's tile, the same one or the other one reads it."""

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32"), Z: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            tile = T.alloc((8,), "float32")
            T.clear(tile)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                T.copy(tile, Y, dst=1 - rank, signal=F[0])  # named
            with T.Scale("warpgroup") as (wg, _):
                if wg == (0 if waits != "same" else 1):
                    T.wait(F[0], ">=", 1)
                if waits == "other, barrier":
                    T.barrier()
                if wg == 1:
                    T.copy(Y, Z)  # named

    return program, each(2, (8,), (8,), 1)


@label(
    "warpgroup",
    RMARACEBENCH("hybrid: one thread signals"),
    wrong={"other": RaceError},
    right=["same", "other, barrier"],
)
def who_signals_a_peer(signals):
    """One warpgroup puts a tile to the neighbour, the same one or the other one signals it."""

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32"), Z: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            tile = T.alloc((8,), "float32")
            T.clear(tile)
            with T.Scale("warpgroup") as (wg, _):
                with T.Scale("device") as (rank, _):
                    if wg == 0:
                        T.copy(tile, Y, dst=1 - rank)  # named
                if signals == "other, barrier":
                    T.barrier()
                with T.Scale("device") as (rank, _):
                    if wg == (0 if signals == "same" else 1):
                        T.signal(F[0], dst=1 - rank)
            T.wait(F[0], ">=", 1)
            T.copy(Y, Z)  # named

    return program, each(2, (8,), (8,), 1)
