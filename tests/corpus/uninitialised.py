# SPDX-License-Identifier: MIT
"""Uninitialized reads: whole tiles and parts, accumulators, workspaces, data that a peer never sent."""

import torch

import tilescale.language as T
from tests.corpus.record import FAIAL, INDIGO, RMARACEBENCH, SIMULEE, TOO_EARLY, Kind, alone, each
from tilescale.errors import DivergedReplicaError, UninitializedReadError

label = Kind("uninitialised")

# -- devices -----------------------------------------------------------------------------------------------------------


@label("device", RMARACEBENCH("conflict: reads of a window"), wrong={"half": UninitializedReadError}, right=["whole"])
def inbox_that_is_half_filled(sent):
    """A workspace is not an argument: it is uninitialized where a peer has not sent."""
    count = 4 if sent == "half" else 8

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            inbox = T.alloc((8,), "float32", level="l2")
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile[0:count], inbox[0:count], dst=1 - rank)
                    T.barrier()
                T.copy(inbox, Y)  # named

    return program, each(2, (8,), (8,))


@label("device", RMARACEBENCH("sync: missing operation"), wrong={"some": UninitializedReadError}, right=["all"])
def sender_that_is_left_out(senders):
    """The first device reads a part of each, but the last one sends none."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=4, block=1, threads=32):
            inbox = T.alloc((4, 8), "float32", level="l2")
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    if rank < (size if senders == "all" else size - 1):
                        T.copy(tile, inbox[rank, 0:8], dst=0)
                    T.barrier()
                    if rank == 0:
                        T.copy(inbox, Y)  # named

    return program, each(4, (8,), (4, 8))


@label("device", RMARACEBENCH("sync: wait until"), wrong={"no wait": TOO_EARLY}, right=["wait"])
def inbox_in_a_workspace(order):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            inbox = T.alloc((8,), "float32", level="l2")
            arrived = T.alloc_flags(1)
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, inbox, dst=1 - rank, signal=arrived[0])
                if order == "wait":
                    T.wait(arrived[0], ">=", 1)
                T.copy(inbox, Y)  # named

    return program, each(2, (8,), (8,))


@label("device", RMARACEBENCH("sync: flags"), wrong={"workspace": UninitializedReadError}, right=["cleared", "flags"])
def flags_that_nobody_cleared(memory):
    """Flags of the call are zero; elements of a workspace are undefined until a unit clears them and all have
    synchronized.
    """

    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            raised = T.alloc_flags(1)
            cells = T.alloc((1,), "int32", level="l2")
            with T.Scale("device") as (rank, _):
                if memory == "cleared":
                    cells[0] = 0
                    T.barrier()
                if memory == "flags":
                    T.signal(raised[0], dst=1 - rank)
                else:
                    T.signal(cells[0], dst=1 - rank)  # named

    return program, each(2, (8,))


@label("device", RMARACEBENCH("sync: collectives"), wrong={"part": UninitializedReadError}, right=["whole"])
def tile_that_a_collective_takes(written):
    count = 4 if written == "part" else 8

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X[0:count], tile[0:count])
                with T.Scale("device"):
                    T.allreduce(tile)  # named
                T.copy(tile, Y)

    return program, each(2, (8,), (8,))


@label("device", RMARACEBENCH("sync: completion of a put"), wrong={"part": UninitializedReadError}, right=["whole"])
def source_of_a_started_gather(written):
    count = 4 if written == "part" else 8

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            part = T.alloc((8,), "float32", level="l2")
            arrived = T.alloc_flags((2, 1))
            with T.Scale("device"):
                T.copy(X[0:count], part[0:count])
                T.all_gather(part, Y, signal=arrived)  # named

    return program, each(2, (8,), (2, 8))


# -- clusters ----------------------------------------------------------------------------------------------------------


@label("cta_cluster", SIMULEE("shared memory that nobody fills"), wrong={"half": UninitializedReadError}, right=["all"])
def row_from_a_neighbour(sent):
    count = 4 if sent == "half" else 8

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((8,), "float32")
                box = T.alloc((8,), "float32")
                T.copy(X[b, 0], mine)
                T.barrier()
                T.copy(mine[0:count], box[0:count], dst=1 - rank)
                T.barrier()
                T.copy(box, Y[b, 0])  # named

    return program, alone((2, 8), (2, 8))


@label("cta_cluster", FAIAL("parts that leave a gap"), wrong={"3": UninitializedReadError}, right=["4"])
def tile_that_a_cluster_fills(width):
    """Each of two blocks fills a number of a tile's eight elements."""
    count = int(width)

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32):
            with T.Scale("cta_cluster"):
                tile = T.alloc((8,), "float32")
                with T.Scale("block") as (rank, _):
                    T.fill(tile[rank * 4 : rank * 4 + count], rank)
                with T.Scale("block") as (rank, _):
                    T.copy(tile[rank * 4 : rank * 4 + 4], Y[rank * 4])  # named

    return program, alone((8,))


@label("cta_cluster", SIMULEE("missing barrier"), wrong={"no barrier": TOO_EARLY}, right=["barrier"])
def read_of_a_neighbour(order):
    """A get of what the neighbour may not have written yet."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((8,), "float32")
                theirs = T.alloc((8,), "float32")
                T.copy(X[b, 0], mine)
                if order == "barrier":
                    T.barrier()
                T.copy(mine, theirs, src=1 - rank)  # named
                T.barrier()
                T.copy(theirs, Y[b, 0])

    return program, alone((2, 8), (2, 8))


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", FAIAL("parts that leave a gap"), wrong={"6": UninitializedReadError}, right=["8"])
def part_of_a_tile(rows):
    count = int(rows)

    @T.prim_func
    def program(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8, 4), "float32")
            T.copy(X[0:count, 0:4], tile[0:count, 0:4])
            T.copy(tile, Y)  # named

    return program, alone((8, 4), (8, 4))


@label("block", INDIGO("guards"), wrong={"i + j < 4": UninitializedReadError}, right=["i + j < 5"])
def elements_under_a_guard(guard):
    """Data written under one condition is read under another one."""
    limit = int(guard.split()[-1])

    @T.prim_func
    def program(Y: T.Tensor((4, 4), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((4, 4), "float32")
            for i, j in T.Parallel(4, 4):
                if i + j < limit:
                    tile[i, j] = i
            for i, j in T.Parallel(4, 4):
                if i + j < 5:
                    Y[i, j] = tile[i, j]  # named

    return program, alone((4, 4))


@label("block", SIMULEE("accumulator"), wrong={"no": UninitializedReadError}, right=["clear", "clear_accum"])
def product_that_adds_to_nothing(clears):
    @T.prim_func
    def program(A: T.Tensor((32, 32), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            T.copy(A, a)
            if clears == "clear":
                T.clear(c)
            T.gemm(a, a, c, clear_accum=clears == "clear_accum")  # named
            T.copy(c, C)

    return program, [torch.ones(32, 32, dtype=torch.float16), *alone((32, 32))]


@label("block", INDIGO("counts in shared memory"), wrong={"no": UninitializedReadError}, right=["yes"])
def counts_that_nobody_cleared(clears):
    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), H: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=8):
            tx = T.get_thread_binding()
            counts = T.alloc_shared((4,), "int32")
            if clears == "yes":
                T.clear(counts)
            T.atomic_add(counts[V[tx]], 1)  # named
            T.copy(counts, H)

    return program, alone(8, 4)


@label("block", INDIGO("scratch in global memory"), wrong={"own row": UninitializedReadError}, right=["all rows"])
def workspace_of_a_device(written):
    """In one phase each block writes its row of a workspace, or only even ones do; in the next one all are read."""

    @T.prim_func
    def program(Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(device=1, block=4, threads=32) as b:
            scratch = T.alloc((4, 8), "float32", level="l2")
            with T.Scale("block"):
                if written == "all rows":
                    T.fill(scratch[b, 0:8], b)
                else:
                    if b < 3:
                        T.fill(scratch[b, 0:8], b)
            with T.Scale("device"):
                with T.Scale("block"):
                    T.copy(scratch[3 - b, 0:8], Y[b, 0:8])  # named

    return program, alone((4, 8))


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label("warpgroup", FAIAL("branches of threads"), wrong={"one": UninitializedReadError}, right=["both"])
def part_of_an_idle_warpgroup(writers):
    """Each warpgroup fills its half, or only the first one does; then the whole is read."""

    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((2, 8), "float32")
            with T.Scale("warpgroup") as (wg, _):
                if writers == "both":
                    T.fill(tile[wg, 0:8], wg)
                else:
                    if wg == 0:
                        T.fill(tile[wg, 0:8], wg)
            T.copy(tile, Y)  # named

    return program, alone((2, 8))


@label("warpgroup", FAIAL("variables of threads"), wrong={"128": UninitializedReadError}, right=["256"])
def variable_of_some_threads(bound):
    count = int(bound)

    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            mine = T.alloc_local((1,), "int32")
            if tx < count:
                mine[0] = tx
            Y[tx] = mine[0]  # named

    return program, alone(256)


@label("warpgroup", SIMULEE("missing reduction"), wrong={"no": DivergedReplicaError}, right=["all-reduce"])
def partial_sums_as_a_whole(reduced):
    """Each warpgroup multiplies half of K: what both hold is a sum only after a reduction."""

    @T.prim_func
    def program(A: T.Tensor((32, 64), "float16"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=256):
            a = T.alloc((32, 64), "float16", level="l1")
            b = T.alloc((64, 32), "float16", level="l1")
            c = T.alloc((32, 32), "float32", level="l0")
            T.copy(A, a)
            T.copy(B, b)
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=T.Replica))
                T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
                if reduced == "all-reduce":
                    T.allreduce(T.view(c, layout=T.Replica))
            T.copy(c, C)  # named

    a = torch.arange(64.0).repeat(32, 1).half() / 64
    return program, [a, a.T.contiguous(), *alone((32, 32))]
