# SPDX-License-Identifier: MIT
"""Fences and barriers that are missing, or that synchronize or order too few."""

import tilescale.language as T
from tests.corpus.record import FAIAL, HIRACE, INDIGO, RMARACEBENCH, SCORD, SIMULEE, TOO_EARLY, Kind, alone, each
from tilescale.errors import CollectiveNotReachedError, RaceError

label = Kind("missing fence or barrier")

# -- devices -----------------------------------------------------------------------------------------------------------


@label(
    "device",
    RMARACEBENCH("sync: barrier, collectives"),
    wrong={"nothing": RaceError, "of blocks": RaceError, "before": RaceError},
    right=["barrier", "all-reduce", "all-gather"],
)
def put_and_a_barrier(order):
    """A collective that exchanges data of all orders as a barrier does; a barrier of local blocks does not."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), S: T.Tensor((3, 1), "float32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                part = T.alloc((1, 1), "float32")
                whole = T.alloc((3, 1), "float32")
                T.copy(X, tile)
                T.clear(part)
                with T.Scale("device") as (rank, size):
                    if order == "before":
                        T.barrier()
                    T.copy(tile, Y, dst=(rank + 1) % size)  # named
                    if order == "barrier":
                        T.barrier()
                    if order == "all-reduce":
                        T.allreduce(part)
                    if order == "all-gather":
                        T.all_gather(part, whole)
                if order == "of blocks":
                    T.barrier()
                T.copy(Y, X)  # named
                T.copy(part, S[0:1, 0:1])

    return program, each(3, (8,), (8,), (3, 1))


@label("device", RMARACEBENCH("sync: barrier of a part"), wrong=CollectiveNotReachedError)
def barrier_of_some_devices():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size)
                if rank < 2:
                    T.barrier()  # named

    return program, each(3, (8,), (8,))


@label("device", RMARACEBENCH("sync: barrier without completion"), wrong={"barrier": RaceError}, right=["wait"])
def barrier_after_a_started_copy(order):
    """Devices synchronize, but their asynchronous copies may still be in flight."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=arrived[0])  # named
                T.barrier()
                if order == "wait":
                    T.wait(arrived[0], ">=", 1)
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(Y, tile)  # named

    return program, each(2, (8,), (8,))


@label("device", RMARACEBENCH("sync: flags that are polled"), wrong={"load": RaceError}, right=["wait"])
def flag_that_is_read(by):
    """A loop that polls a flag sees its value but acquires no earlier data; only a wait acquires."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=1):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y, dst=1 - rank, signal=F[0])  # named
                if by == "wait":
                    T.wait(F[0], ">=", 1)
                else:
                    while F[0] == 0:  # named
                        T.evaluate(0)
                T.copy(Y, X)

    return program, each(2, (8,), (8,), 1)


@label("device", RMARACEBENCH("sync: barrier, remote"), wrong={"reader": RaceError}, right=["barrier"])
def get_before_it_is_there(order):
    """Each device writes its own part, and gets that of its neighbour."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                with T.Scale("device") as (rank, size):
                    T.fill(X, rank)  # named
                    if order == "barrier":
                        T.barrier()
                    T.copy(X, tile, src=(rank + 1) % size)  # named
                T.copy(tile, Y)

    return program, each(3, (8,), (8,))


# -- clusters ----------------------------------------------------------------------------------------------------------


@label(
    "cta_cluster",
    HIRACE("shared memory, groups of blocks"),
    wrong={"none": RaceError, "first only": RaceError, "second only": RaceError},
    right=["both"],
)
def box_in_a_cluster(barriers):
    """The box is emptied, filled by a neighbour and read; a barrier separates each two of these."""

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(cta_cluster=4, block=4, threads=32) as b:
            with T.Scale("block") as (rank, size):
                row = T.alloc((8,), "float32")
                box = T.alloc((8,), "float32")
                T.copy(X[b, 0], row)
                T.clear(box)  # named: second only
                if barriers in ("first only", "both"):
                    T.barrier()
                T.copy(row, box, dst=(rank + 1) % size)  # named
                if barriers in ("second only", "both"):
                    T.barrier()
                T.copy(box, Y[b, 0])  # named: first only

    return program, alone((4, 8), (4, 8))


@label("cta_cluster", SIMULEE("missing barrier"), wrong={"none": RaceError}, right=["stock", "split"])
def reads_of_a_neighbour(barrier):
    """A block reads what its neighbour in the cluster has made, after one barrier or its two halves."""

    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((8,), "float32")
                theirs = T.alloc((8,), "float32")
                T.clear(mine)
                T.barrier()
                T.fill(mine, rank)  # named
                if barrier == "stock":
                    T.cluster_sync()
                if barrier == "split":
                    T.cluster_arrive()
                    T.cluster_wait()
                T.copy(mine, theirs, src=1 - rank)  # named
                T.copy(theirs, Y[b, 0])
                T.barrier()

    return program, alone((2, 8))


@label("cta_cluster", SCORD("scope too narrow"), wrong={"block": RaceError}, right=["cluster"])
def barrier_of_too_few(scope):
    """The threads of each block synchronize, but not those of the cluster."""

    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(2, threads=32, cluster_dims=2) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((8,), "float32")
                box = T.alloc((8,), "float32")
                T.fill(mine, rank)
                T.clear(box)
                T.cluster_sync()
                T.copy(mine, box, dst=1 - rank)  # named
                if scope == "block":
                    T.sync_threads()
                else:
                    T.cluster_sync()
                T.copy(box, Y[b, 0])  # named

    return program, alone((2, 8))


# -- blocks ------------------------------------------------------------------------------------------------------------


@label(
    "block",
    HIRACE("global memory, missing barrier of the grid"),
    wrong={"nothing": RaceError, "threads": RaceError},
    right=["grid", "barrier", "phases"],
)
def neighbours_in_a_grid(order):
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32"), Z: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                T.fill(Y[b, 0:8], b)  # named
                if order == "threads":
                    T.sync_threads()
                if order == "grid":
                    T.sync_grid()
                if order == "barrier":
                    T.barrier()
                if order != "phases":
                    T.copy(Y[(b + 1) % 4, 0], Z[b, 0])  # named
            if order == "phases":
                with T.Scale("device"):
                    with T.Scale("block"):
                        T.copy(Y[(b + 1) % 4, 0], Z[b, 0])

    return program, alone((4, 8), (4, 8))


@label(
    "block",
    SCORD("missing fence"),
    wrong={"relaxed, acquire": RaceError, "release, relaxed": RaceError, "relaxed, relaxed": RaceError},
    right=["release, acquire", "seq_cst, seq_cst"],
)
def message_by_atomics(orders):
    """One block writes a row and raises a flag by an atomic store; another one spins on an atomic load of it."""
    store, load = orders.split(", ")

    @T.prim_func
    def program(R: T.Tensor((8,), "int32"), F: T.Tensor((1,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(2, threads=1) as b:
            seen = T.alloc_var("int32", init=0)
            if b == 0:
                for i in T.serial(8):
                    R[i] = i + 1  # named
                T.atomic_store(F[0], 1, memory_order=store)
            else:
                while seen == 0:
                    seen = T.atomic_load(F[0], memory_order=load)
                for i in T.serial(8):
                    Y[i] = R[i]  # named

    return program, alone(8, 1, 8)


@label(
    "block",
    INDIGO("last block adds up"),
    wrong={"relaxed": RaceError, "acquire": RaceError, "release": RaceError},
    right=["acq_rel", "seq_cst"],
)
def tickets(order):
    """The block that draws the last ticket adds up what all have left: the draw has to release and to acquire."""

    @T.prim_func
    def program(P: T.Tensor((4,), "int32"), C: T.Tensor((1,), "int32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(4, threads=1) as b:
            total = T.alloc_var("int32", init=0)
            P[b] = b  # named
            ticket = T.atomic_add(C[0], 1, return_prev=True, memory_order=order)
            if ticket == 3:
                for i in T.serial(4):
                    total = total + P[i]  # named
                Y[0] = total

    return program, alone(4, 1, 1)


@label("block", INDIGO("several kernels"), wrong={"one launch": RaceError}, right=["two launches"])
def sums_of_neighbours(form):
    """The end of a launch is a barrier of all its blocks."""

    @T.prim_func
    def program(V: T.Tensor((6,), "int32"), W: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as b:
            V[b + 1] = b  # named
            if form == "one launch":
                W[b] = V[b] + V[b + 2]  # named
        if form == "two launches":
            with T.Kernel(4, threads=1) as b:
                W[b] = V[b] + V[b + 2]

    return program, alone(6, 4)


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label(
    "warpgroup",
    FAIAL("missing barrier"),
    wrong={"nothing": TOO_EARLY, "after": TOO_EARLY},
    right=["barrier", "end of the scale", "own part"],
)
def tile_of_the_other_warpgroup(order):
    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            parts = T.alloc((2, 8), "float32")
            with T.Scale("warpgroup") as (rank, _):
                T.fill(parts[rank, 0:8], rank)
                if order == "barrier":
                    T.barrier()
                if order == "own part":
                    T.copy(parts[rank, 0:8], Y[rank, 0:8])
                if order in ("nothing", "after", "barrier"):
                    T.copy(parts[1 - rank, 0:8], Y[rank, 0:8])  # named
                if order == "after":
                    T.barrier()
            if order == "end of the scale":
                with T.Scale("warpgroup") as (rank, _):
                    T.copy(parts[1 - rank, 0:8], Y[rank, 0:8])

    return program, alone((2, 8))


@label("warpgroup", HIRACE("warps of a block"), wrong={"nothing": TOO_EARLY}, right=["barrier"])
def tile_of_the_next_warp(order):
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=128):
            parts = T.alloc((4, 8), "float32")
            with T.Scale("warp") as (rank, size):
                T.fill(parts[rank, 0:8], rank)
                if order == "barrier":
                    T.barrier()
                T.copy(parts[(rank + 1) % size, 0:8], Y[rank, 0:8])  # named

    return program, alone((4, 8))


@label("warpgroup", HIRACE("warps of a block"), wrong={"nothing": RaceError, "after": RaceError}, right=["barrier"])
def loads_after_a_bulk_store(order):
    """A warpgroup stores a tile as a whole, and the other one loads it element by element."""

    @T.prim_func
    def program(X: T.Tensor((128, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((64, 64), "float32")
            with T.Scale("warpgroup") as (rank, _):
                if rank == 0:
                    T.fill(tile, 5)
                    T.copy(tile, X[0:64, :])  # named
                if order == "barrier":
                    T.barrier()
                if rank == 1:
                    for i, j in T.Parallel(64, 64):
                        Y[i, j] = X[63 - i, j] * 2  # named
                if order == "after":
                    T.barrier()

    return program, alone((128, 64), (64, 64))


@label(
    "warpgroup",
    FAIAL("divergent branch"),
    wrong={"nothing": RaceError, "barrier before": RaceError, "read before": RaceError},
    right=["barrier", "own branch"],
)
def store_in_a_branch_of_one_warp(order):
    """One warp stores what all warps load; a barrier in front of the store does not order the two."""

    @T.prim_func
    def program(Y: T.Tensor((4, 32), "float32")):
        with T.Kernel(1, threads=128):
            row = T.alloc((32,), "float32")
            T.clear(row)
            with T.Scale("warp") as (rank, _):
                if order == "barrier before":
                    T.barrier()
                if order == "read before":
                    T.copy(row, Y[rank, 0:32])  # named: read before
                if rank == 2:
                    for i in T.Parallel(32):
                        row[i] = i  # named
                    if order == "own branch":
                        T.copy(row, Y[rank, 0:32])
                if order == "barrier":
                    T.barrier()
                if order in ("nothing", "barrier before", "barrier"):
                    T.copy(row, Y[rank, 0:32])  # named: nothing, barrier before

    return program, alone((4, 32))


@label("warpgroup", SIMULEE("missing barrier"), wrong={"nothing": RaceError}, right=["barrier"])
def fragment_that_is_handed_over(order):
    """A warpgroup copies into a tile that the other one has in registers."""

    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (rank, _):
                mine = T.alloc((8,), "float32", level="l0")
                theirs = T.alloc((8,), "float32", level="l0")
                T.fill(mine, rank)
                T.clear(theirs)
                T.barrier()
                T.copy(mine, theirs, dst=1 - rank)  # named
                if order == "barrier":
                    T.barrier()
                T.copy(theirs, Y[rank, 0:8])  # named

    return program, alone((2, 8))


@label("warpgroup", FAIAL("barriers of some threads"), wrong={"128": RaceError}, right=["256"])
def named_barrier_of_too_few(count):
    """Both halves call a named barrier: for all 256 threads, or for 128, so that each half synchronizes by itself."""
    threads = int(count)

    @T.prim_func
    def program(X: T.Tensor((128,), "float32"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((128,), "float32")
            T.clear(tile)
            if tx < 128:
                tile[tx] = X[tx]  # named
                T.sync_threads(1, threads)
            else:
                T.sync_threads(1, threads)
                Y[tx - 128] = tile[tx - 128]  # named

    return program, alone((128,), (128,))
