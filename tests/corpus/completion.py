# SPDX-License-Identifier: MIT
"""Asynchronous operations: which waits cover their completion, and of which operations."""

import tilescale.language as T
from tests.corpus.fences import label
from tests.corpus.record import GSAN, RMARACEBENCH, alone, each
from tilescale.errors import RaceError


@label(
    "device",
    RMARACEBENCH("conflict, local: nonblocking operation"),
    wrong={"store": RaceError, "get": RaceError},
    right=["load", "store after it"],
)
def source_of_a_put_under_way(access):
    """Block 1 puts data of block 0, which uses the source meanwhile, or after it has acquired the completion."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), Z: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as b:
            begins, done = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8,), "float32")
                if rank == 0:
                    if b == 0:
                        T.clear(tile)
                        T.copy(tile, X)
                        T.signal(begins[0])
                        if access == "load":
                            T.copy(X, tile)
                            T.copy(tile, Z)
                        if access == "get":
                            T.copy(Z, tile, src=1)
                            T.copy(tile, X)  # named: get
                        if access == "store after it":
                            T.wait(done[0], ">=", 1)
                            T.copy(tile, X)
                        if access == "store":
                            T.copy(tile, X)  # named: store
                    else:
                        T.wait(begins[0], ">=", 1)
                        T.copy(X, tile)  # named
                        T.copy(tile, Y, dst=1)
                        T.signal(done[0])

    return program, each(2, (8,), (8,), (8,))


@label(
    "device",
    RMARACEBENCH("sync: completion in a context"),
    wrong={"nothing": RaceError, "of the third": RaceError},
    right=["of the first"],
)
def end_of_a_put_before_the_next(end):
    """Two blocks put to one place of a peer, a third one to another; the second waits for the end of one of them."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=3, threads=32) as b:
            done = T.alloc_flags(3)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                if b == 1:
                    if end == "of the first":
                        T.wait(done[0], ">=", 1)
                    if end == "of the third":
                        T.wait(done[2], ">=", 1)
                T.copy(tile, Y[b // 2, 0:8], dst=1 - rank)  # named
                T.signal(done[b])

    return program, each(2, (8,), (2, 8))


@label("device", RMARACEBENCH("sync: fence of gets"), wrong={"put": RaceError}, right=["get"])
def order_of_a_get_and_a_put(ends):
    """A block gets data that another one overwrites: that one waits for the end of an earlier put, or of the get."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32"), Z: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=3, threads=32) as b:
            done = T.alloc_flags(2)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8,), "float32")
                if b == 0:
                    T.copy(Y[0, 0:8], tile, src=1 - rank)  # named
                    T.copy(tile, Z)
                    T.signal(done[0])
                if b == 1:
                    T.copy(X, tile)
                    T.copy(tile, Y[1, 0:8], dst=1 - rank)
                    T.signal(done[1])
                if b == 2:
                    T.copy(X, tile)
                    T.wait(done[0 if ends == "get" else 1], ">=", 1)
                    T.copy(tile, Y[0, 0:8], dst=1 - rank)  # named

    return program, each(2, (8,), (2, 8), (8,))


@label("device", RMARACEBENCH("sync: collectives"), wrong={"nothing": RaceError}, right=["barrier"])
def put_into_a_sum(order):
    """Each device adds up the parts of all others. Its own sum does not imply that the others' sums are complete."""

    @T.prim_func
    def program(X: T.Tensor((1,), "float32"), Y: T.Tensor((3, 1), "float32"), S: T.Tensor((1, 1), "float32")):
        with T.Kernel(device=3, block=1, threads=1):
            arrived = T.alloc_flags(1)
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile = T.alloc((1, 1), "float32")
                for peer in T.serial(3):
                    tile[0, 0] = X[0]
                    T.copy(tile, Y[rank : rank + 1, 0:1], dst=peer, signal=arrived[0])
                T.wait(arrived[0], ">=", size)
                S[0, 0] = Y[0, 0] + Y[1, 0] + Y[2, 0]  # named
                if order == "barrier":
                    T.barrier()
                if rank == 0:
                    T.clear(tile)
                    T.copy(tile, S, dst=1)  # named

    return program, each(3, (1,), (3, 1), (1, 1))


@label(
    "block",
    GSAN("relaxed counter"),
    wrong=dict.fromkeys(["read after write", "write after read", "write after write"], RaceError),
    right=["released read after write", "released write after read", "released write after write"],
)
def tile_handed_over_by_a_counter(case):
    """A block counts after its access to a tile; another one polls the counter before its own."""
    *_, second, _, first = case.split()
    acquire, release = ("acquire", "release") if case.startswith("released") else ("relaxed", "relaxed")

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(2, threads=1) as b:
            tile = T.alloc_shared((8, 8), "float32")
            seen = T.alloc_var("int32", init=0)
            T.clear(tile)
            if b == 0:
                if first == "write":
                    T.copy(tile, X)  # named: read after write, write after write
                else:
                    T.copy(X, tile)  # named: write after read
                    T.copy(tile, Y)
                T.atomic_add(C[0], 1, memory_order=release)
            else:
                while seen < 1:
                    seen = T.atomic_load(C[0], memory_order=acquire)
                if second == "write":
                    T.copy(tile, X)  # named: write after read, write after write
                else:
                    T.copy(X, tile)  # named: read after write
                    T.copy(tile, Y)

    return program, alone((8, 8), (8, 8), 1)
