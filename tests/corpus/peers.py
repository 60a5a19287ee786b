# SPDX-License-Identifier: MIT
"""Payloads that devices and blocks pass on by counters and flags, over one step or several, released or not."""

import tilescale.language as T
from tests.corpus.completion import label
from tests.corpus.record import FAIAL, GSAN, HIRACE, INDIGO, alone, each
from tilescale.errors import RaceError


@label("device", GSAN("payload of a peer"), wrong={"nothing": RaceError, "own counter": RaceError}, right=["counter"])
def payload_of_the_peer(told):
    """Each device stores its payload, counts at device 0, and reads what the other one has stored once both have."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tile = T.alloc((8,), "float32")
                T.clear(tile)
                T.copy(tile, X)  # named
                if told == "counter":
                    for peer in T.serial(size):
                        T.signal(C[0], dst=peer)
                    T.wait(C[0], ">=", size)
                if told == "own counter":
                    T.signal(C[0], dst=rank)
                    T.wait(C[0], ">=", 1)
                T.copy(X, tile, src=1 - rank)  # named
                T.copy(tile, Y)

    return program, each(2, (8,), (8,), 1)


@label("device", GSAN("buffer of a peer"), wrong={"before": RaceError, "after": RaceError}, right=["both"])
def buffer_of_the_peer_is_filled(barrier):
    """Device 0 reads its buffer, which the peer fills, and reads it again; a barrier is left out, or none."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8,), "float32")
                T.clear(tile)
                if rank == 0:
                    T.copy(X, tile)  # named: before
                    T.copy(tile, Y[0, 0:8])
                if barrier != "before":
                    T.barrier()
                if rank == 1:
                    T.copy(tile, X, dst=0)  # named
                if barrier != "after":
                    T.barrier()
                if rank == 0:
                    T.copy(X, tile)  # named: after
                    T.copy(tile, Y[1, 0:8])

    return program, each(2, (8,), (2, 8))


@label("device", GSAN("transitive"), wrong={"others wait": RaceError, "no last wait": RaceError}, right=["relay"])
def payload_over_a_relay(who):
    """Device 0 puts to device 2 and signals device 1, which signals device 2; one wait, or none, is left out."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32"), F: T.Tensor((2,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8,), "float32")
                T.clear(tile)
                if rank == 0:
                    T.copy(tile, X, dst=2)  # named
                    T.signal(F[0], dst=1)
                if rank == 1:
                    if who != "others wait":
                        T.wait(F[0], ">=", 1)
                    T.signal(F[1], dst=2)
                if rank == 2:
                    if who != "no last wait":
                        T.wait(F[1], ">=", 1)
                    T.copy(X, tile)  # named
                    T.copy(tile, Y)

    return program, each(3, (8,), (8,), 2)


@label(
    "block",
    GSAN("transitive"),
    wrong=dict.fromkeys(["relaxed first", "relaxed relay", "relaxed last"], RaceError),
    right=["released"],
)
def payload_over_a_block(order):
    """Three blocks pass a payload on by two counters, of which one is relaxed, or none."""
    first = "relaxed" if order == "relaxed first" else "release"
    seen_by, tells = ("relaxed", "relaxed") if order == "relaxed relay" else ("acquire", "release")
    last = "relaxed" if order == "relaxed last" else "acquire"

    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32"), C: T.Tensor((2,), "int32")):
        with T.Kernel(3, threads=1) as b:
            tile = T.alloc_shared((8, 8), "float32")
            seen = T.alloc_var("int32", init=0)
            T.clear(tile)
            if b == 0:
                T.copy(tile, X)  # named
                T.atomic_add(C[0], 1, memory_order=first)
            if b == 1:
                while seen < 1:
                    seen = T.atomic_load(C[0], memory_order=seen_by)
                T.atomic_add(C[1], 1, memory_order=tells)
            if b == 2:
                while seen < 1:
                    seen = T.atomic_load(C[1], memory_order=last)
                T.copy(X, tile)  # named
                T.copy(tile, Y)

    return program, alone((8, 8), (8, 8), 2)


@label("block", GSAN("counter of several"), wrong={"relaxed": RaceError, "one too few": RaceError}, right=["released"])
def payloads_of_three_writers(order):
    """Three blocks store and count; a fourth one reads all stores after the counter is complete."""
    release, enough = "relaxed" if order == "relaxed" else "release", 2 if order == "one too few" else 3

    @T.prim_func
    def program(X: T.Tensor((3, 8), "float32"), Y: T.Tensor((3, 8), "float32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(4, threads=1) as b:
            tile = T.alloc_shared((3, 8), "float32")
            seen = T.alloc_var("int32", init=0)
            T.clear(tile)
            if b < 3:
                T.copy(tile[0, 0:8], X[b, 0:8])  # named
                T.atomic_add(C[0], 1, memory_order=release)
            else:
                while seen < enough:
                    seen = T.atomic_load(C[0], memory_order="acquire")
                T.copy(X, tile)  # named
                T.copy(tile, Y)

    return program, alone((3, 8), (3, 8), 1)


@label("block", HIRACE("atomic and plain access"), wrong={"store": RaceError}, right=["atomic", "own place"])
def counters_of_all_blocks(access):
    """All blocks count in one place; the last one sets it, or another one."""

    @T.prim_func
    def program(C: T.Tensor((2,), "int32")):
        with T.Kernel(4, threads=1) as b:
            if b == 3:
                if access == "atomic":
                    T.atomic_add(C[0], 7)
                if access == "store":
                    C[0] = 7  # named
                if access == "own place":
                    C[1] = 7
            else:
                T.atomic_add(C[0], 1)  # named

    return program, alone(2)


@label("block", INDIGO("populate worklist"), wrong={"plain counter": RaceError}, right=["atomic counter"])
def worklist_of_vertices(counter):
    """Blocks append results to a list, at the index that a counter returns."""

    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), W: T.Tensor((8,), "int32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(8, threads=1) as b:
            place = T.alloc_var("int32", init=0)
            if counter == "atomic counter":
                place = T.atomic_add(C[0], 1, return_prev=True)
            else:
                place = C[0]  # named: plain counter
                C[0] = place + 1  # named: plain counter
            W[place] = V[b]

    return program, alone(8, 8, 1)


@label("block", INDIGO("conditional edge"), wrong={"no atomic": RaceError}, right=["atomic", "each its own"])
def edges_that_meet_a_condition(by):
    """Each block counts its edges to larger vertices, in a counter of all or of its own."""

    @T.prim_func
    def program(E: T.Tensor((4, 4), "int32"), C: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as b:
            for i in T.serial(4):
                if E[b, i] <= b:
                    if by == "atomic":
                        T.atomic_add(C[0], 1)
                    if by == "no atomic":
                        C[0] = C[0] + 1  # named
                    if by == "each its own":
                        C[b] = C[b] + 1

    return program, [alone(16)[0].reshape(4, 4), *alone(4)]


@label("block", INDIGO("path compression"), wrong={"stores": RaceError}, right=["atomics"])
def parents_are_shortened(by):
    """Each block follows its vertex's parents and stores the root; others read these parents meanwhile."""

    @T.prim_func
    def program(P: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as b:
            here = T.alloc_var("int32", init=0)
            here = b
            for _ in T.serial(3):
                if by == "atomics":
                    here = T.atomic_load(P[here], memory_order="relaxed")
                else:
                    here = P[here]  # named: stores
            if by == "atomics":
                T.atomic_store(P[b], here, memory_order="relaxed")
            else:
                P[b] = here  # named: stores

    return program, alone(8)


@label("block", FAIAL("loop with a stride"), wrong={"overlapping halves": RaceError}, right=["halves", "interleaved"])
def halves_of_a_sum(form):
    """In each step of a reduction half of the blocks add another half's elements to their own."""
    step, width = (2, 1) if form == "interleaved" else (1, 4)
    shift = 3 if form == "overlapping halves" else width

    @T.prim_func
    def program(X: T.Tensor((8,), "float32")):
        with T.Kernel(4, threads=1) as b:
            X[b * step] = X[b * step] + X[b * step + shift]  # named: overlapping halves

    return program, alone((8,))
