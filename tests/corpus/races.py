# SPDX-License-Identifier: MIT
"""Data races: two accesses to one element, at least one of them a write, without any order between them."""

import torch

import tilescale.language as T
from tests.corpus.record import FAIAL, HIRACE, INDIGO, RMARACEBENCH, Kind, alone, each
from tilescale.errors import RaceError

label = Kind("data race")

# -- devices -----------------------------------------------------------------------------------------------------------


@label(
    "device",
    RMARACEBENCH("conflict, remote"),
    wrong=dict.fromkeys(
        ["put and load", "put and store", "put and put", "put and atomic", "get and store", "get and put",
         "get and atomic", "atomic and load", "atomic and store"],
        RaceError,
    ),
    right=["get and load", "get and get", "atomic and atomic"],
)  # fmt: skip
def memory_of_the_second_device(accesses):
    """The first device reaches it from afar; the second one itself, or the third one, does at the same time."""
    remote, other = accesses.split(" and ")

    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "int32")
                T.clear(tile)
                with T.Scale("device") as (rank, _):
                    if rank == 0:
                        if remote == "put":
                            T.copy(tile, X, dst=1)  # named: put and load, put and store, put and put, put and atomic
                        if remote == "get":
                            T.copy(X, tile, src=1)  # named: get and store, get and put, get and atomic
                            T.copy(tile, Y)
                        if remote == "atomic":
                            T.signal(X[0], dst=1)  # named: atomic and load, atomic and store
                    if rank == 1:
                        if other == "load":
                            T.copy(X, Y)  # named: put and load, atomic and load
                        if other == "store":
                            T.fill(X, 1)  # named: put and store, get and store, atomic and store
                    if rank == 2:
                        if other == "put":
                            T.copy(tile, X, dst=1)  # named: put and put, get and put
                        if other == "get":
                            T.copy(X, tile, src=1)
                            T.copy(tile, Y)
                        if other == "atomic":
                            T.signal(X[0], dst=1)  # named: put and atomic, get and atomic

    return program, each(3, 8, 8)


@label("device", RMARACEBENCH("conflict, local"), wrong={"store": RaceError}, right=["load", "second send"])
def source_of_a_started_copy(access):
    """A copy that is only started still reads its source, which others may read as well."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32"), Z: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived = T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                T.copy(X, Y[0, :], dst=1 - rank, signal=arrived[0])  # named
                if access == "second send":
                    T.copy(X, Y[1, :], dst=1 - rank, signal=arrived[0])
            with T.Scale("block"):
                if access == "store":
                    T.clear(X)  # named
                else:
                    T.copy(X, Z)

    return program, each(2, (8,), (2, 8), (8,))


@label("device", RMARACEBENCH("conflict, remote: parts of one window"), wrong={"9": RaceError}, right=["8"])
def inbox_in_parts(rows):
    """Every device puts its part into the inbox of the first device: eight rows each, or one more."""
    count = int(rows)

    @T.prim_func
    def program(X: T.Tensor((9, 4), "float32"), Y: T.Tensor((40, 4), "float32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((9, 4), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile[0:count, 0:4], Y[rank * 8 : rank * 8 + count, 0:4], dst=0)  # named

    return program, each(4, (9, 4), (40, 4))


@label("device", RMARACEBENCH("misc: aliasing"), wrong={"one tensor": RaceError}, right=["two tensors"])
def inbox_that_is_the_outbox(given):
    """Two parameters may be the same memory: then what is sent is overwritten by what comes."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)  # named
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y, dst=1 - rank)  # named

    tensors = each(2, (8,), (8,))
    return program, [[x, x if given == "one tensor" else y] for x, y in tensors]


@label("device", RMARACEBENCH("misc: aliasing"), wrong=RaceError)
def one_tensor_of_two_devices():
    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            T.clear(X)  # named

    (x,) = alone((8,))
    return program, [[x], [x]]


@label("device", RMARACEBENCH("sync: collectives"), wrong={"same part": RaceError}, right=["other part"])
def block_beside_a_collective(part):
    """A block writes while another one of its device contributes a row to an all-reduce."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as b:
            with T.Scale("block"):
                if b == 1:
                    T.clear(X[0 if part == "same part" else 1, 0:8])  # named
                else:
                    with T.Scale("device"):
                        T.allreduce(X[0, 0:8])  # named

    return program, each(2, (2, 8))


@label("device", RMARACEBENCH("conflict, remote, in phases"), wrong={"own phases": RaceError}, right=["barrier"])
def launches_of_two_devices(order):
    """One device is in its second launch while the other may still be in its first."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y, dst=1 - rank)  # named
            if order == "barrier":
                with T.Scale("device"):
                    T.barrier()
        with T.Kernel(device=2, block=1, threads=32):
            T.copy(Y, X)  # named

    return program, each(2, (8,), (8,))


# -- clusters ----------------------------------------------------------------------------------------------------------


@label(
    "cta_cluster", HIRACE("shared memory, read and write"), wrong={"put": RaceError, "get": RaceError}, right=["none"]
)
def tile_of_the_next_block(access):
    """Blocks of a cluster reach each other's shared memory while its owner uses it."""

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(cta_cluster=4, block=4, threads=32) as b:
            with T.Scale("block") as (rank, size):
                mine = T.alloc((8,), "float32")
                box = T.alloc((8,), "float32")
                T.clear(mine)
                T.clear(box)
                T.barrier()
                if access == "put":
                    T.copy(mine, box, dst=(rank + 1) % size)  # named: put
                if access == "get":
                    T.copy(mine, box, src=(rank + 1) % size)  # named: get
                T.copy(X[b, 0], mine)  # named: get
                T.copy(box, Y[b, 0])  # named: put
                T.barrier()

    return program, alone((4, 8), (4, 8))


@label("cta_cluster", HIRACE("shared memory, two writes"), wrong={"one": RaceError}, right=["each"])
def places_in_the_first_block(place):
    """All blocks of a cluster put a row into the first one: all the same, or each its own."""

    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(cta_cluster=4, block=4, threads=32) as b:
            with T.Scale("block") as (rank, _):
                row = T.alloc((8,), "float32")
                rows = T.alloc((4, 8), "float32")
                T.fill(row, rank)
                T.clear(rows)
                T.barrier()
                T.copy(row, rows[rank if place == "each" else 0, 0:8], dst=0)  # named
                T.barrier()
                if b == 0:
                    T.copy(rows, Y)

    return program, alone((4, 8))


@label("cta_cluster", FAIAL("indices that overlap"), wrong={"5": RaceError}, right=["4"])
def parts_of_a_tile_of_the_cluster(width):
    """The blocks of a cluster fill parts of its tile: four elements each, or one more."""
    count = int(width)

    @T.prim_func
    def program(Y: T.Tensor((12,), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32):
            with T.Scale("cta_cluster"):
                tile = T.alloc((12,), "float32")
                T.clear(tile)
                with T.Scale("block") as (rank, _):
                    T.fill(tile[rank * 4 : rank * 4 + count], rank)  # named
                with T.Scale("block") as (rank, _):
                    T.copy(tile[rank * 6 : rank * 6 + 6], Y[rank * 6])

    return program, alone((12,))


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", HIRACE("global memory, write and read"), wrong={"nothing": RaceError}, right=["flag", "phases"])
def row_of_the_next_block(order):
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32"), Z: T.Tensor((4, 8), "float32"), F: T.Tensor((4,), "int32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            with T.Scale("block"):
                row = T.alloc((8,), "float32")
                T.fill(row, b)
                T.copy(row, Y[b, 0])  # named
                if order == "flag":
                    T.signal(F[b])
                    T.wait(F[(b + 1) % 4], ">=", 1)
                if order != "phases":
                    T.copy(Y[(b + 1) % 4, 0], Z[b, 0])  # named
            if order == "phases":
                with T.Scale("device"):
                    with T.Scale("block"):
                        T.copy(Y[(b + 1) % 4, 0], Z[b, 0])

    return program, alone((4, 8), (4, 8), 4)


@label("block", HIRACE("global memory, two writes"), wrong={"same value": RaceError, "own value": RaceError})
def all_blocks_write_one_place(value):
    """Also where all write the same value: a write is not necessarily one step."""

    @T.prim_func
    def program(Y: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as b:
            T.fill(Y, 7 if value == "same value" else b)  # named

    return program, alone((4,))


@label("block", FAIAL("strides"), wrong={"blocked, too long": RaceError}, right=["blocked", "cyclic"])
def loop_over_elements(form):
    """Blocks share out a vector: neighbouring elements, or every fourth; or a loop runs into the next block's part."""

    @T.prim_func
    def program(Y: T.Tensor((32,), "int32")):
        with T.Kernel(4, threads=1) as b:
            if form == "cyclic":
                for k in T.serial(8):
                    Y[b + k * 4] = k
            if form == "blocked":
                for k in T.serial(8):
                    Y[b * 8 + k] = k
            if form == "blocked, too long":
                for k in T.serial(9):
                    if b * 8 + k < 32:
                        Y[b * 8 + k] = k  # named

    return program, alone(32)


@label("block", FAIAL("two dimensions"), wrong={"row and column": RaceError}, right=["row"])
def rows_and_columns(reads):
    """Each block writes its row and reads its row, or the column of that number."""

    @T.prim_func
    def program(Y: T.Tensor((4, 4), "float32"), Z: T.Tensor((4, 4), "float32")):
        with T.Kernel(4, threads=32) as b:
            for j in T.Parallel(4):
                Y[b, j] = b  # named
            for j in T.Parallel(4):
                Z[b, j] = Y[b, j] if reads == "row" else Y[j, b]  # named

    return program, alone((4, 4), (4, 4))


@label("block", FAIAL("address of another type"), wrong={"1": RaceError}, right=["0"])
def bytes_of_a_neighbour(shift):
    """One block clears the first half as numbers, the other one the second half as bytes, or from one byte before."""
    before = int(shift)

    @T.prim_func
    def program(Y: T.Tensor((16,), "float32")):
        with T.Kernel(2, threads=32) as b:
            by_bytes = T.view(Y, (64,), "int8")
            if b == 0:
                T.clear(Y[0:8])  # named
            else:
                for i in T.Parallel(32):
                    by_bytes[32 - before + i] = 1  # named

    return program, alone((16,))


EDGES = torch.tensor([1, 2, 3, 3, 0, 2, 1, 1], dtype=torch.int32)
"""Of eight edges the vertex that each leads to; two begin at each of four vertices."""


@label("block", INDIGO("pull"), wrong={"in place": RaceError}, right=["to another array"])
def pull_from_neighbours(target):
    """Each vertex adds up its neighbours' values."""

    @T.prim_func
    def program(E: T.Tensor((8,), "int32"), V: T.Tensor((4,), "int32"), W: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as v:
            total = T.alloc_var("int32", init=0)
            for k in T.serial(2):
                total = total + V[E[2 * v + k]]  # named
            if target == "in place":
                V[v] = total  # named
            else:
                W[v] = total

    return program, [EDGES, *alone(4, 4)]


@label("block", INDIGO("push"), wrong={"stores": RaceError}, right=["atomics"])
def push_to_neighbours(by):
    """Each vertex adds to its neighbours' values; several have the same neighbour."""

    @T.prim_func
    def program(E: T.Tensor((8,), "int32"), W: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as v:
            for k in T.serial(2):
                if by == "atomics":
                    T.atomic_add(W[E[2 * v + k]], v)
                else:
                    W[E[2 * v + k]] = v  # named

    return program, [EDGES, *alone(4)]


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label("warpgroup", HIRACE("shared memory, write and read"), wrong={"l0": RaceError, "l1": RaceError})
def part_of_the_other_warpgroup(layer):
    @T.prim_func
    def program(Y: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=256):
            parts = T.alloc((2, 8), "int32", level=layer)
            T.clear(parts)
            with T.Scale("warpgroup") as (rank, _):
                for i in T.Parallel(8):
                    parts[rank, i] = i  # named
                for i in T.Parallel(8):
                    Y[rank, i] = parts[1 - rank, i]  # named

    return program, [torch.zeros(2, 8, dtype=torch.int32)]


@label(
    "warpgroup",
    HIRACE("shared memory, two writes"),
    wrong={"whole": RaceError, "overlap": RaceError},
    right=["own"],
)
def warpgroups_fill_a_tile(part):
    """Both fill all of it; or halves, of which one is a row too long; or halves."""
    first, rows = {"whole": (0, 8), "overlap": (3, 5), "own": (4, 4)}[part]

    @T.prim_func
    def program(Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((8, 8), "float32")
            T.clear(tile)
            with T.Scale("warpgroup") as (rank, _):
                T.fill(tile[rank * first : rank * first + rows, 0:8], rank)  # named
            T.copy(tile, Y)

    return program, alone((8, 8))


@label("warpgroup", RMARACEBENCH("hybrid: threads of a process"), wrong={"both": RaceError}, right=["one", "own rows"])
def warpgroups_send_to_a_peer(who):
    """The warpgroups of a block put into the same inbox of the next device."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=256):
            tile = T.alloc((8,), "float32")
            T.copy(X, tile)
            with T.Scale("warpgroup") as (wg, _):
                with T.Scale("device") as (rank, _):
                    if who == "both":
                        T.copy(tile, Y[0, 0:8], dst=1 - rank)  # named
                    if who == "one":
                        if wg == 0:
                            T.copy(tile, Y[0, 0:8], dst=1 - rank)
                    if who == "own rows":
                        T.copy(tile, Y[wg, 0:8], dst=1 - rank)

    return program, each(2, (8,), (2, 8))


@label("warpgroup", FAIAL("branches of threads"), wrong={"same half": RaceError}, right=["own half"])
def branches_of_threads(half):
    """Two branches of a program are two tasks, if they are to run side by side."""

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((8,), "float32")
            done = T.alloc_barrier(256)
            tx = T.get_thread_binding()
            if tx < 128:
                T.fill(tile[0:4], 1)  # named
                T.barrier_arrive(done)
            else:
                T.fill(tile[0:8] if half == "same half" else tile[4:8], 2)  # named
                T.barrier_arrive(done)
                T.barrier_wait(done, 0)
                T.copy(tile, Y)

    return program, alone((8,))
