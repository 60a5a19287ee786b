# SPDX-License-Identifier: MIT
"""Wrong flags: another element, another unit's, another count, another comparison, another phase."""

import tilescale.language as T
from tests.corpus.record import (
    FAIAL,
    HIRACE,
    INDIGO,
    RMARACEBENCH,
    SCORD,
    SIMULEE,
    TOO_EARLY,
    Kind,
    alone,
    each,
)
from tilescale.errors import DeadlockError, RaceError

label = Kind("wrong flag")

# -- devices -----------------------------------------------------------------------------------------------------------


@label("device", RMARACEBENCH("sync: wait until"), wrong={"transposed": RaceError, "same": RaceError}, right=["own"])
def flag_of_a_block(flag):
    """Blocks (x, y) of two devices exchange tiles with a flag each; some wait for a flag of another block."""

    @T.prim_func
    def program(X: T.Tensor((4, 4), "float32"), Y: T.Tensor((4, 4), "float32"), F: T.Tensor((2, 2), "int32")):
        with T.Kernel(device=2, block=(2, 2), threads=32) as (x, y):
            with T.Scale("block"):
                tile = T.alloc((2, 2), "float32")
                T.copy(X[2 * x, 2 * y], tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y[2 * x : 2 * x + 2, 2 * y : 2 * y + 2], dst=1 - rank, signal=F[x, y])  # named
                if flag == "own":
                    T.wait(F[x, y], ">=", 1)
                if flag == "transposed":
                    T.wait(F[y, x], ">=", 1)
                if flag == "same":
                    T.wait(F[0, 0], ">=", 1)
                T.copy(Y[2 * x : 2 * x + 2, 2 * y : 2 * y + 2], tile)  # named
                T.copy(tile, X[2 * x, 2 * y])

    args = each(2, (4, 4), (4, 4), 4)
    return program, [[x, y, f.reshape(2, 2)] for x, y, f in args]


@label(
    "device",
    RMARACEBENCH("sync: signal of another operation"),
    wrong=dict.fromkeys(["other flag", "own signal", "other way"], RaceError),
    right=["this flag"],
)
def flag_of_the_put(flag):
    """A ring of puts: waits for a flag that another device, or this one, has raised; or the put signals the sender."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    T.signal(F[1], dst=(rank + size - 1) % size)
                    T.copy(tile, Y, dst=(rank + 1) % size)  # named
                    T.signal(F[0], dst=(rank + (2 if flag == "other way" else 1)) % size)
                    if flag == "own signal":
                        T.signal(F[1])
                if flag == "other flag":
                    T.wait(F[1], ">=", 1)
                if flag == "own signal":
                    T.wait(F[1], ">=", 2)
                if flag in ("this flag", "other way"):
                    T.wait(F[0], ">=", 1)
                T.copy(Y, X)  # named

    return program, each(3, (8,), (8,), 2)


@label(
    "device",
    RMARACEBENCH("sync: several origins"),
    wrong={">= 2": RaceError, "> 1": RaceError, "!= 0": RaceError, "== 4": DeadlockError, ">= 4": DeadlockError},
    right=[">= 3", "> 2", "== 3"],
)
def count_of_senders(condition):
    """Three devices send a part each to the first one, which waits for a number of them."""
    compare, number = condition.split()
    value = int(number)

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((4, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    if rank > 0:
                        T.copy(tile, Y[rank, 0:8], dst=0, signal=F[0])  # named: >= 2, > 1, != 0
                    else:
                        T.wait(F[0], compare, value)  # named: == 4, >= 4
                        for peer in T.serial(1, size):
                            T.copy(Y[peer, 0:8], tile)  # named: >= 2, > 1, != 0

    return program, each(4, (8,), (4, 8), 1)


@label("device", RMARACEBENCH("sync: signal set"), wrong={"set": RaceError}, right=["add"])
def two_signals_of_one_flag(op):
    """Two senders raise one flag: where both set it to one, the sender is unknown."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((3, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    if rank > 0:
                        T.copy(tile, Y[rank, 0:8], dst=0)  # named
                        T.signal(F[0], 1, op=op, dst=0)
                    else:
                        T.wait(F[0], ">=", 1 if op == "set" else 2)
                        T.copy(Y[1, 0:8], tile)  # named

    return program, each(3, (8,), (3, 8), 1)


@label("device", RMARACEBENCH("sync: transitive order"), right=["add", "set"])
def either_of_two_relays(op):
    """Both have acquired the first device's data, so either of their signals covers it."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.clear(tile)
                with T.Scale("device") as (rank, _):
                    if rank == 0:
                        T.copy(tile, X, dst=3)
                        T.signal(F[0], dst=1)
                        T.signal(F[0], dst=2)
                    if rank == 1 or rank == 2:
                        T.wait(F[0], ">=", 1)
                        T.signal(F[0], 1, op=op, dst=3)
                    if rank == 3:
                        T.wait(F[0], ">=", 1)
                        T.copy(X, tile)

    return program, each(4, (8,), 1)


@label("device", RMARACEBENCH("sync: wrong target"), wrong={"next": DeadlockError}, right=["root"])
def peer_that_is_told(peer):
    """All send to the first device; the signal goes there, or to the next device."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((3, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y[rank, 0:8], dst=0)
                    T.signal(F[0], dst=0 if peer == "root" else (rank + 1) % size)
                    if rank == 0:
                        T.wait(F[0], ">=", 3)  # named
                        T.copy(Y[2, 0:8], X)

    return program, each(3, (8,), (3, 8), 1)


@label(
    "device", RMARACEBENCH("sync: chunks"), wrong={"first chunk": RaceError, "own rank": RaceError}, right=["own chunk"]
)
def flag_of_a_chunk(flag):
    """A gather raises a flag for each chunk of each rank."""

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((2, 4, 8), "float32"), Z: T.Tensor((2, 4), "float32")):
        with T.Kernel(device=2, block=(2, 4), threads=32) as (r, i):
            arrived = T.alloc_flags((2, 2))
            with T.Scale("device"):
                T.all_gather(X, Y, signal=arrived, chunk=2)  # named
            with T.Scale("block"):
                if flag == "own chunk":
                    T.wait(arrived[r, i // 2], ">=", 1)
                if flag == "first chunk":
                    T.wait(arrived[r, 0], ">=", 1)
                if flag == "own rank":
                    T.wait(arrived[T.rank("device"), i // 2], ">=", 1)
                Z[r, i] = Y[r, i, 0]  # named

    return program, each(2, (4, 8), (2, 4, 8), (2, 4))


# -- clusters ----------------------------------------------------------------------------------------------------------


@label("cta_cluster", SIMULEE("barriers of the wrong group"), wrong={"own": RaceError}, right=["next"])
def barrier_of_the_next_block(target):
    """A block that copies to the next one arrives at that block's barrier, or, by mistake, at its own."""

    @T.prim_func
    def program(Y: T.Tensor((4, 32), "float32")):
        with T.Kernel(cta_cluster=4, block=4, threads=32) as b:
            with T.Scale("block") as (rank, size):
                mine = T.alloc((32,), "float32")
                box = T.alloc((32,), "float32")
                here = T.alloc_cluster_barrier([32])
                T.fill(mine, rank)
                T.clear(box)
                T.barrier()
                T.copy(mine, box, dst=(rank + 1) % size)  # named
                T.mbarrier_arrive(here[0], (rank + 1) % size if target == "next" else rank)
                T.mbarrier_wait_parity(here[0], 0)
                T.copy(box, Y[b, 0])  # named
                T.barrier()

    return program, alone((4, 32))


@label("cta_cluster", FAIAL("index of a barrier"), wrong={"0": RaceError}, right=["1"])
def barrier_of_the_second_copy(number):
    """Two copies with a barrier each; the second tile is read after a wait for the first one's."""
    waits = int(number)

    @T.prim_func
    def program(X: T.Tensor((2, 32), "float32"), Y: T.Tensor((2, 32), "float32")):
        with T.Kernel(2, threads=32, cluster_dims=2) as b:
            own = T.alloc_shared((32,), "float32")
            first = T.alloc_shared((32,), "float32")
            second = T.alloc_shared((32,), "float32")
            arrived = T.alloc_cluster_barrier([1, 1])
            T.copy(X[b, 0], own)
            T.clear(second)
            T.cluster_sync()
            T.copy_cluster(own, first, dst_block=(b + 1) % 2, remote_barrier=arrived[0])
            T.copy_cluster(own, second, dst_block=(b + 1) % 2, remote_barrier=arrived[1])  # named
            T.mbarrier_wait_parity(arrived[waits], 0)
            T.copy(second, Y[b, 0])  # named
            T.cluster_sync()

    return program, alone((2, 32), (2, 32))


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", HIRACE("flags between blocks"), wrong={"own": RaceError, "before": RaceError}, right=["next"])
def flag_of_the_next_row(flag):
    """Blocks raise a flag for their row, and read the next one's after a wait for some flag."""
    step = {"own": 0, "next": 1, "before": 3}[flag]

    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32"), Z: T.Tensor((4, 8), "float32"), F: T.Tensor((4,), "int32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                T.fill(Y[b, 0:8], b)  # named
                T.signal(F[b])
                T.wait(F[(b + step) % 4], ">=", 1)
                T.copy(Y[(b + 1) % 4, 0], Z[b, 0])  # named

    return program, alone((4, 8), (4, 8), 4)


@label("block", SCORD("scope too narrow"), wrong={"own device": RaceError}, right=["peer"])
def flag_on_the_own_device(target):
    """Blocks of two devices: the flag is raised on the device that does not wait for it."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=2, threads=32) as b:
            with T.Scale("block"):
                row = T.alloc((8,), "float32")
                T.copy(X[b, 0], row)
                with T.Scale("device") as (rank, _):
                    T.copy(row, Y[b, 0:8], dst=1 - rank)  # named
                    T.signal(F[b], dst=1 - rank if target == "peer" else rank)
                T.wait(F[b], ">=", 1)
                T.copy(Y[b, 0], X[b, 0])  # named

    return program, each(2, (2, 8), (2, 8), 2)


@label("block", INDIGO("counts of a worklist"), wrong={"3": RaceError, "5": DeadlockError}, right=["4"])
def count_of_blocks(number):
    """The first block reads what four blocks have written when it has counted that many."""
    count = int(number)

    @T.prim_func
    def program(P: T.Tensor((4,), "int32"), C: T.Tensor((1,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=1, block=4, threads=1) as b:
            with T.Scale("block"):
                P[b] = b  # named: 3
                T.signal(C[0])
                if b == 0:
                    T.wait(C[0], ">=", count)  # named: 5
                    for i in T.serial(4):
                        Y[i] = P[i]  # named: 3

    return program, alone(4, 1, 4)


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label(
    "warpgroup",
    FAIAL("barriers with phases"),
    wrong={"the first": TOO_EARLY},
    right=["this"],
)
def parity_of_a_phase(phase):
    """The consumer waits for this round's phase, or in all rounds for the first one's."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            ring = T.alloc_shared((2, 8), "float32")
            full, taken = T.alloc_barrier(128), T.alloc_barrier(128)
            tx = T.get_thread_binding()
            if tx < 128:
                for k in T.serial(2):
                    T.barrier_wait(taken, (k + 1) % 2)
                    T.copy(X[k, 0], ring[k, 0:8])
                    T.barrier_arrive(full)
            else:
                for k in T.serial(2):
                    if phase == "this":
                        T.barrier_wait(full, k % 2)
                    else:
                        T.barrier_wait(full, 0)
                    T.copy(ring[k, 0:8], Y[k, 0])  # named
                    T.barrier_arrive(taken)

    return program, alone((2, 8), (2, 8))


@label("warpgroup", FAIAL("index of a barrier"), wrong={"0": TOO_EARLY, "2": DeadlockError}, right=["1"])
def barrier_of_the_second_tile(number):
    """Two tiles with a barrier each, and a third barrier without arrivals."""
    waits = int(number)

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=256):
            tiles = T.alloc_shared((2, 8), "float32")
            full = T.alloc_barrier([128, 128, 128])
            tx = T.get_thread_binding()
            if tx < 128:
                T.copy(X[0, 0], tiles[0, 0:8])
                T.barrier_arrive(full[0])
                T.copy(X[1, 0], tiles[1, 0:8])
                T.barrier_arrive(full[1])
            else:
                T.barrier_wait(full[waits], 0)  # named: 2
                T.copy(tiles[1, 0:8], Y)  # named: 0

    return program, alone((2, 8), (8,))


@label("warpgroup", SIMULEE("barriers of the wrong number"), wrong={"3": RaceError}, right=["2"])
def number_of_a_named_barrier(number):
    """The writer arrives under number 3 before it writes, and under 2 after; the reader synchronizes under one of them.
    """
    late = int(number)

    @T.prim_func
    def program(X: T.Tensor((128,), "float32"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((128,), "float32")
            T.clear(tile)
            if tx < 128:
                T.sync_threads(late, 256)
                Y[tx] = tile[tx]  # named
            else:
                T.named_barrier_arrive(3, 256)
                tile[tx - 128] = X[tx - 128]  # named
                T.named_barrier_arrive(2, 256)

    return program, alone((128,), (128,))
