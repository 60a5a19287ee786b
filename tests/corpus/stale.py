# SPDX-License-Identifier: MIT
"""Stale buffers: a place that is used again before its reader is done, or a value of an earlier round or launch."""

import tilescale.language as T
from tests.corpus.record import FAIAL, HIRACE, INDIGO, RMARACEBENCH, SCORD, SIMULEE, Kind, alone, each
from tilescale.errors import DeadlockError, RaceError

label = Kind("stale buffer")

# -- devices -----------------------------------------------------------------------------------------------------------


@label(
    "device",
    RMARACEBENCH("sync: window that is used again"),
    wrong=dict.fromkeys(["1 for 2", "2 for 3", "1 for 4"], RaceError),
    right=["1 for 1", "2 for 2", "3 for 2"],
)
def inboxes_and_credits(form):
    """Four rounds through a number of inboxes; the sender may be a number of rounds ahead."""
    buffers, ahead = (int(word) for word in form.split(" for "))

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((buffers, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                with T.Scale("device") as (rank, _):
                    for step in T.serial(4):
                        if rank == 0:
                            T.copy(X[step, 0], tile)
                            T.wait(F[1], ">=", step - ahead + 1)
                            T.copy(tile, Y[step % buffers, 0:8], dst=1, signal=F[0])  # named
                        else:
                            T.wait(F[0], ">=", step + 1)
                            T.copy(Y[step % buffers, 0:8], tile)  # named
                            T.signal(F[1], dst=0)
                            T.copy(tile, X[step, 0])

    return program, each(2, (4, 8), (buffers, 8), 2)


@label("device", RMARACEBENCH("sync: barrier between epochs"), wrong={"1": RaceError}, right=["2", "alternating"])
def rounds_with_barriers(barriers):
    """Neighbours exchange tiles three times: a barrier after the put, and one after the read or two inboxes."""
    places = 2 if barriers == "alternating" else 1

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((places, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    for step in T.serial(3):
                        T.copy(tile, Y[step % places, 0:8], dst=1 - rank)  # named
                        T.barrier()
                        T.copy(Y[step % places, 0:8], tile)  # named
                        if barriers == "2":
                            T.barrier()

    return program, each(2, (8,), (places, 8))


@label("device", RMARACEBENCH("sync: notification of an earlier epoch"), wrong={"1": RaceError}, right=["2"])
def second_launch_with_the_same_flag(value):
    """Two launches send through an inbox each; the second waits for a value that the flag has had since the first."""
    count = int(value)

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                T.copy(X, Y[0, 0:8], dst=1 - rank, signal=F[0])
                T.wait(F[0], ">=", 1)
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y[1, 0:8], dst=1 - rank, signal=F[0])  # named
                    T.wait(F[0], ">=", count)
                T.copy(Y[1, 0:8], X)  # named

    return program, each(2, (8,), (2, 8), 1)


@label("device", RMARACEBENCH("sync: notification of an earlier epoch"), wrong={"1": RaceError}, right=["r + 1"])
def round_that_waits_for_the_first(value):
    """In every round a part of its own; but the flag of the first round is enough for the wait."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((3, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, _):
                    for r in T.serial(3):
                        T.copy(tile, Y[r, 0:8], dst=1 - rank, signal=F[0])  # named
                        T.wait(F[0], ">=", 1 if value == "1" else r + 1)
                        T.copy(Y[r, 0:8], tile)  # named

    return program, each(2, (8,), (3, 8), 1)


@label("device", RMARACEBENCH("sync: reset of a notification"), wrong={"no": RaceError}, right=["barrier"])
def flag_that_is_cleared(order):
    """A program clears its flag before use, while the peer may have raised it already."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                F[0] = 0  # named
                if order == "barrier":
                    T.barrier()
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    T.copy(X, Y, dst=1 - rank, signal=F[0])  # named

    return program, each(2, (8,), (8,), 1)


@label("device", RMARACEBENCH("conflict, local, in a loop"), wrong={"no": RaceError}, right=["answer"])
def source_of_the_next_copy(order):
    """The device changes the source before it starts the next copy."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((3, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            arrived, taken = T.alloc_flags(1), T.alloc_flags(1)
            with T.Scale("device") as (rank, _):
                for step in T.serial(3):
                    T.copy(X, Y[step, :], dst=1 - rank, signal=arrived[0])  # named
                    T.wait(arrived[0], ">=", step + 1)
                    if order == "answer":
                        T.signal(taken[0], dst=1 - rank)
                        T.wait(taken[0], ">=", step + 1)
                    with T.Scale("block"):
                        T.fill(X, step)  # named

    return program, each(2, (8,), (3, 8))


@label("device", RMARACEBENCH("sync: ring"), wrong={"no": RaceError}, right=["credit"])
def tiles_round_a_ring(order):
    """Four devices forward tiles; the next one may be a round ahead of the previous one."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(3):
                        if order == "credit":
                            T.wait(F[1], ">=", step)
                        T.copy(tile, Y, dst=(rank + 1) % size, signal=F[0])  # named
                        T.wait(F[0], ">=", step + 1)
                        T.copy(Y, tile)  # named
                        T.signal(F[1], dst=(rank + size - 1) % size)
                T.copy(tile, X)

    return program, each(4, (8,), (8,), 2)


# -- clusters ----------------------------------------------------------------------------------------------------------


@label("cta_cluster", HIRACE("shared memory, in rounds"), wrong={"1": RaceError}, right=["2", "alternating"])
def box_of_the_next_block(barriers):
    """Blocks of a cluster pass rows on in shared memory, in three rounds."""
    places = 2 if barriers == "alternating" else 1

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(cta_cluster=4, block=4, threads=32) as b:
            with T.Scale("block") as (rank, size):
                row = T.alloc((8,), "float32")
                box = T.alloc((places, 8), "float32")
                T.copy(X[b, 0], row)
                T.barrier()
                for step in T.serial(3):
                    T.copy(row, box[step % places, 0:8], dst=(rank + 1) % size)  # named
                    T.barrier()
                    T.copy(box[step % places, 0:8], row)  # named
                    if barriers == "2":
                        T.barrier()
                T.copy(row, Y[b, 0])

    return program, alone((4, 8), (4, 8))


@label("cta_cluster", SIMULEE("tile that is filled again"), wrong={"no": RaceError}, right=["region"])
def tile_of_the_cluster(order):
    """The blocks fill a tile together and read all of it; in the next round it is filled again."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 2, 8), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32):
            with T.Scale("cta_cluster"):
                tile = T.alloc((8,), "float32")
                for step in T.serial(2):
                    with T.Scale("block") as (rank, _):
                        T.copy(X[step, rank * 4], tile[rank * 4 : rank * 4 + 4])
                        if order == "no":
                            T.barrier()
                            T.copy(tile, Y[step, rank, 0])  # named
                            T.copy(X[step, 0], tile[rank * 4 : rank * 4 + 4])  # named
                    if order == "region":
                        with T.Scale("block") as (rank, _):
                            T.copy(tile, Y[step, rank, 0])

    return program, alone((2, 8), (2, 2, 8))


# -- blocks ------------------------------------------------------------------------------------------------------------


@label("block", INDIGO("in place, in rounds"), wrong={"in place": RaceError}, right=["two arrays"])
def relaxation(form):
    """Each round replaces an element by the sum of its neighbours: of this round's values, or of the last one's."""

    @T.prim_func
    def program(V: T.Tensor((2, 6), "int32")):
        with T.Kernel(device=1, block=4, threads=1) as b:
            with T.Scale("device"):
                for step in T.serial(2):
                    with T.Scale("block"):
                        if form == "in place":
                            V[0, b + 1] = V[0, b] + V[0, b + 2]  # named
                        else:
                            V[(step + 1) % 2, b + 1] = V[step % 2, b] + V[step % 2, b + 2]

    return program, [alone(12)[0].reshape(2, 6)]


@label("block", SCORD("flag that is used again"), wrong={"1": RaceError}, right=["r + 1"])
def rounds_between_blocks(value):
    """Two blocks exchange rows in rounds; the wait of the second round is over since the first."""

    @T.prim_func
    def program(Y: T.Tensor((2, 2, 8), "float32"), Z: T.Tensor((2, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=1, block=2, threads=32) as b:
            with T.Scale("block"):
                for r in T.serial(2):
                    T.fill(Y[r, b, 0:8], b + r)  # named
                    T.signal(F[b])
                    T.wait(F[1 - b], ">=", 1 if value == "1" else r + 1)
                    T.copy(Y[r, 1 - b, 0:8], Z[b, 0:8])  # named

    return program, [alone((4, 8))[0].reshape(2, 2, 8), *alone((2, 8), 2)]


@label("block", SCORD("place that is used again"), wrong={"no": RaceError}, right=["answer"])
def row_that_is_written_again(order):
    """One block hands rows to another one through one place."""

    @T.prim_func
    def program(Y: T.Tensor((8,), "float32"), Z: T.Tensor((3, 8), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=1, block=2, threads=32) as b:
            with T.Scale("block"):
                for r in T.serial(3):
                    if b == 0:
                        if order == "answer":
                            T.wait(F[1], ">=", r)
                        T.fill(Y, r)  # named
                        T.signal(F[0])
                    else:
                        T.wait(F[0], ">=", r + 1)
                        T.copy(Y, Z[r, 0])  # named
                        T.signal(F[1])

    return program, alone((8,), (3, 8), 2)


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label(
    "warpgroup",
    INDIGO("stencil of neighbours"),
    wrong={"nothing": RaceError, "before": RaceError, "stored again": RaceError},
    right=["barrier", "two tiles"],
)
def stencil_of_warps(order):
    """Each warp stores a row, and reads those of its neighbours; in a second step it stores its row again."""

    @T.prim_func
    def program(X: T.Tensor((4, 32), "float32"), Y: T.Tensor((2, 4, 32), "float32")):
        with T.Kernel(1, threads=128):
            rows = T.alloc((12, 32), "float32")
            T.clear(rows)
            with T.Scale("warp") as (rank, _):
                for step in T.serial(2):
                    mine = 6 * step + rank + 1 if order == "two tiles" else rank + 1
                    if order == "before":
                        T.barrier()
                    for i in T.Parallel(32):
                        rows[mine, i] = X[rank, i] + step  # named
                    if order in ("barrier", "two tiles", "stored again"):
                        T.barrier()
                    for i in T.Parallel(32):
                        Y[step, rank, i] = rows[mine - 1, i] + rows[mine + 1, i]  # named
                    if order == "barrier":
                        T.barrier()

    return program, alone((4, 32), (2, 4, 32))


@label(
    "warpgroup",
    FAIAL("producer and consumer, in a loop"),
    wrong={"1 for 2": RaceError, "2 for 3": RaceError},
    right=["1 for 1", "2 for 2", "3 for 2"],
)
def ring_of_tiles(form):
    """A producer runs ahead by as many tiles as there are barriers; the ring has a number of tiles."""
    slots, ahead = (int(word) for word in form.split(" for "))

    @T.prim_func
    def program(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=256):
            ring = T.alloc_shared((slots, 8), "float32")
            full, taken = T.alloc_barrier([128] * ahead), T.alloc_barrier([128] * ahead)
            tx = T.get_thread_binding()
            if tx < 128:
                for k in T.serial(4):
                    T.barrier_wait(taken[k % ahead], k // ahead % 2 ^ 1)
                    T.copy(X[k, 0], ring[k % slots, 0:8])  # named
                    T.barrier_arrive(full[k % ahead])
            else:
                for k in T.serial(4):
                    T.barrier_wait(full[k % ahead], k // ahead % 2)
                    T.copy(ring[k % slots, 0:8], Y[k, 0])  # named
                    T.barrier_arrive(taken[k % ahead])

    return program, alone((4, 8), (4, 8))


@label("warpgroup", HIRACE("shared memory, in rounds"), wrong={"1": RaceError}, right=["2", "alternating"])
def parts_in_rounds(barriers):
    """Warpgroups write a part each and read the other one's, in two rounds."""
    places = 2 if barriers == "alternating" else 1

    @T.prim_func
    def program(Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            parts = T.alloc((places, 2, 8), "float32")
            with T.Scale("warpgroup") as (rank, _):
                for step in T.serial(2):
                    T.fill(parts[step % places, rank, 0:8], step + rank)  # named
                    T.barrier()
                    T.copy(parts[step % places, 1 - rank, 0:8], Y[rank, 0:8])  # named
                    if barriers == "2":
                        T.barrier()

    return program, alone((2, 8))


@label("warpgroup", FAIAL("barriers with phases"), wrong={"of one": (RaceError, DeadlockError)}, right=["of both"])
def phase_that_is_missed(answers):
    """A producer and two consumers: it goes on when one of them, or both, have seen a phase."""
    count = 2 if answers == "of both" else 1

    @T.prim_func
    def program(Y: T.Tensor((384,), "int32")):
        with T.Kernel(1, threads=384):
            tx = T.get_thread_binding()
            ready, taken = T.alloc_barrier(128), T.alloc_barrier(128 * count)
            with T.ws(0):
                for k in T.serial(4):
                    T.barrier_wait(taken, (k + 1) % 2)
                    T.barrier_arrive(ready)
            with T.ws(1):
                for k in T.serial(4):
                    T.barrier_wait(ready, k % 2)
                    T.barrier_arrive(taken)
            with T.ws(2):
                for k in T.serial(4):
                    T.barrier_wait(ready, k % 2)  # named
                    if count == 2:
                        T.barrier_arrive(taken)
            Y[tx] = 1

    return program, alone(384)
