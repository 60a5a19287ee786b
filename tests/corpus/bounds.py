# SPDX-License-Identifier: MIT
"""Out of bounds: flags, peers, barriers, elements and tiles that do not exist. Accesses that TileLang guards are
correct.
"""

import torch

import tilescale.language as T
from tests.corpus.record import FAIAL, INDIGO, RMARACEBENCH, SIMULEE, Kind, alone, each
from tilescale.errors import OutOfBoundsError, PeerOutOfRangeError

label = Kind("out of bounds")

# -- devices -----------------------------------------------------------------------------------------------------------


@label(
    "device",
    RMARACEBENCH("misc: displacement"),
    wrong={"one too far": OutOfBoundsError, "before the first": OutOfBoundsError},
    right=["own"],
)
def flag_of_a_peer(place):
    shift = {"own": 0, "one too far": 1, "before the first": -1}[place]

    @T.prim_func
    def program(F: T.Tensor((4,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("device") as (rank, size):
                T.signal(F[rank + shift], dst=(rank + 1) % size)  # named

    return program, each(4, 4)


@label("device", RMARACEBENCH("misc: displacement"), wrong={"5": OutOfBoundsError}, right=["3"])
def flag_that_is_waited_for(number):
    @T.prim_func
    def program(F: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device"):
                T.wait(F[n], ">=", 0)  # named

    return program, [[f, int(number)] for (f,) in each(2, 4)]


@label(
    "device",
    RMARACEBENCH("misc: target rank"),
    wrong={"put": PeerOutOfRangeError, "get": PeerOutOfRangeError, "signal": PeerOutOfRangeError},
    right=["wrapped"],
)
def peer_after_the_last(access):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as (rank, size):
                if access == "put":
                    T.copy(X, Y, dst=rank + 1)  # named: put
                if access == "get":
                    T.copy(X, Y, src=rank - 1)  # named: get
                if access == "signal":
                    T.signal(F[0], dst=rank + 1)  # named: signal
                if access == "wrapped":
                    T.copy(X, Y, dst=(rank + 1) % size)

    return program, each(3, (8,), (8,), 1)


@label("device", RMARACEBENCH("misc: extent of a window"), wrong={"outside": OutOfBoundsError}, right=["cut off"])
def put_over_the_end(place):
    """A copy to a peer is cut off at the end of its tensor; one that lies outside completely is a mistake."""
    first = 6 if place == "cut off" else 8

    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((4,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y[first + rank], dst=1 - rank)  # named

    return program, each(2, (4,), (8,))


@label("device", RMARACEBENCH("misc: root"), wrong={"3": PeerOutOfRangeError}, right=["2"])
def root_of_a_broadcast(root):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device"):
                T.broadcast(X, root=n)  # named

    return program, [[x, int(root)] for (x,) in each(3, (8,))]


# -- clusters ----------------------------------------------------------------------------------------------------------


@label("cta_cluster", FAIAL("bounds of shared memory"), wrong={"5": OutOfBoundsError}, right=["4"])
def tile_of_a_neighbour(first):
    """On-chip copies are not clipped."""

    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(cta_cluster=2, block=2, threads=32):
            with T.Scale("block") as (rank, _):
                mine = T.alloc((4,), "float32")
                theirs = T.alloc((8,), "float32")
                T.copy(X, mine)
                T.barrier()
                T.copy(mine, theirs[n : n + 4], dst=1 - rank)  # named
                T.barrier()

    return program, [*alone((4,)), int(first)]


@label("cta_cluster", SIMULEE("group that does not exist"), wrong={"4": PeerOutOfRangeError}, right=["3"])
def block_after_the_last(number):
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(cta_cluster=4, block=8, threads=32):
            with T.Scale("block") as (rank, _):
                mine = T.alloc((4,), "float32")
                theirs = T.alloc((4, 4), "float32")
                T.copy(X, mine)
                T.barrier()
                T.copy(mine, theirs[rank, 0:4], dst=n)  # named
                T.barrier()

    return program, [*alone((4,)), int(number)]


@label("cta_cluster", FAIAL("index of a barrier"), wrong={"2": OutOfBoundsError}, right=["1"])
def barrier_in_a_cluster(number):
    @T.prim_func
    def program(Y: T.Tensor((2,), "int32"), n: T.int32):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block"):
                here = T.alloc_cluster_barrier([32, 32])
                T.barrier()
                T.mbarrier_arrive(here[n], 1 - T.block_rank_in_cluster())  # named
                T.barrier()
                Y[b] = 1

    return program, [*alone(2), int(number)]


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", INDIGO("bounds"), wrong={"70": OutOfBoundsError, "-100": OutOfBoundsError}, right=["63", "-1"])
def element_of_a_tensor(number):
    """TileLang does not guard an index that is a number; a negative one counts from the end."""
    place = int(number)

    @T.prim_func
    def program(X: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            X[place] = 1  # named

    return program, alone(64)


@label("block", INDIGO("bounds"), right=["store", "load", "tile"])
def accesses_that_are_guarded(access):
    """More blocks than parts of the tensor: accesses that TileLang guards, and clipped tiles, are right."""

    @T.prim_func
    def program(X: T.Tensor((60,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(4, threads=16) as b:
            tx = T.get_thread_binding()
            tile = T.alloc_shared((16,), "int32")
            if access == "store":
                X[b * 16 + tx] = 1
            if access == "load":
                Y[b * 16 + tx] = X[b * 16 + tx]
            if access == "tile":
                T.copy(X[b * 16], tile)
                T.copy(tile, Y[b * 16])

    return program, alone(60, 64)


@label("block", INDIGO("counts of a worklist"), wrong={"8 bins": OutOfBoundsError}, right=["9 bins"])
def bins_in_shared_memory(bins):
    """The bin of a number may be the number itself, which is at most eight."""
    count = int(bins.split()[0])

    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), H: T.Tensor((count,), "int32")):
        with T.Kernel(1, threads=8):
            tx = T.get_thread_binding()
            counts = T.alloc_shared((count,), "int32")
            T.clear(counts)
            T.atomic_add(counts[V[tx]], 1)  # named
            T.copy(counts, H)

    return program, [torch.tensor([1, 8, 3, 3, 5, 7, 2, 1], dtype=torch.int32), *alone(count)]


@label("block", FAIAL("bounds of shared memory"), wrong={"5 steps": OutOfBoundsError}, right=["4 steps"])
def slices_of_a_tile(steps):
    count = int(steps.split()[0])

    @T.prim_func
    def program(X: T.Tensor((5, 4), "float32"), Y: T.Tensor((16,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((16,), "float32")
            for k in T.serial(n):
                T.copy(X[k, 0], tile[4 * k : 4 * k + 4])  # named
            T.copy(tile, Y)

    return program, [*alone((5, 4), (16,)), count]


@label("block", FAIAL("bounds of shared memory"), wrong={"load": OutOfBoundsError, "store": OutOfBoundsError})
def element_of_a_tile(access):
    @T.prim_func
    def program(X: T.Tensor((16,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8,), "float32")
            T.fill(tile, 0)
            if access == "load":
                X[0] = tile[n]  # named: load
            else:
                tile[n] = X[0]  # named: store

    return program, [*alone((16,)), 8]


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label("warpgroup", FAIAL("bounds of shared memory"), wrong={"192": OutOfBoundsError}, right=["128"])
def threads_beyond_a_tile(threads):
    """A tile has an element for each thread of one warpgroup."""
    count = int(threads)

    @T.prim_func
    def program(X: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((128,), "int32")
            if tx < count:
                tile[tx] = X[tx]  # named

    return program, alone(256)


@label("warpgroup", FAIAL("bounds of shared memory"), wrong={"2 rows": OutOfBoundsError}, right=["3 rows"])
def row_of_a_warpgroup(rows):
    """Three warpgroups, with a row each."""
    count = int(rows.split()[0])

    @T.prim_func
    def program(Y: T.Tensor((3, 8), "float32")):
        with T.Kernel(1, threads=384):
            tile = T.alloc_shared((count, 8), "float32")
            with T.Scale("warpgroup") as (wg, _):
                T.fill(tile[wg, 0:8], wg)  # named
                T.copy(tile[wg, 0:8], Y[wg, 0:8])

    return program, alone((3, 8))


@label("warpgroup", FAIAL("index of a barrier"), wrong={"2": OutOfBoundsError}, right=["1"])
def barrier_of_a_role(number):
    @T.prim_func
    def program(Y: T.Tensor((256,), "int32"), n: T.int32):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            full = T.alloc_barrier([128, 128])
            if tx < 128:
                T.barrier_arrive(full[n])  # named
            else:
                T.barrier_wait(full[1], 0)
            Y[tx] = 1

    return program, [*alone(256), int(number)]


@label("warpgroup", SIMULEE("group that does not exist"), wrong={"no wrap": PeerOutOfRangeError}, right=["wrapped"])
def warpgroup_after_the_last(peer):
    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as (rank, size):
                mine = T.alloc((8,), "float32", level="l0")
                theirs = T.alloc((8,), "float32", level="l0")
                T.fill(mine, rank)
                T.copy(mine, theirs, dst=(rank + 1) % size if peer == "wrapped" else rank + 1)  # named
                T.barrier()
                T.copy(theirs, Y[rank, 0:8])

    return program, alone((2, 8))
