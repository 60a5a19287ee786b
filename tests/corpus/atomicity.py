# SPDX-License-Identifier: MIT
"""Updates that are not atomic, atomic among some of the units only, or mixed with plain accesses."""

import torch

import tilescale.language as T
from tests.corpus.record import FAIAL, HIRACE, INDIGO, RMARACEBENCH, SCORD, Kind, alone, each
from tilescale.errors import RaceError

label = Kind("atomicity")

# -- devices -----------------------------------------------------------------------------------------------------------


@label("device", RMARACEBENCH("atomic"), wrong={"get and put": RaceError, "one puts": RaceError}, right=["signal"])
def counter_of_the_first_device(by):
    """All devices count themselves at the first one: in one step, or by taking the count and putting it back."""

    @T.prim_func
    def program(C: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=1):
            with T.Scale("block"):
                seen = T.alloc((1,), "int32")
                with T.Scale("device") as (rank, _):
                    if by == "signal":
                        T.signal(C[0], dst=0)
                    if by == "get and put":
                        T.copy(C, seen, src=0)
                        seen[0] = seen[0] + 1
                        T.copy(seen, C, dst=0)  # named: get and put
                    if by == "one puts":
                        if rank == 2:
                            T.fill(seen, 1)
                            T.copy(seen, C, dst=0)  # named: one puts
                        else:
                            T.signal(C[0], dst=0)  # named: one puts

    return program, each(3, 1)


@label("device", RMARACEBENCH("atomic and plain, remote"), wrong={"store": RaceError, "load": RaceError}, right=["own"])
def count_beside_a_plain_access(access):
    """Peers count at a device while it clears or reads the count plainly; or another one of its own."""

    @T.prim_func
    def program(C: T.Tensor((2,), "int32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=1):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if rank == 0:
                    if access == "store":
                        C[0] = 0  # named: store
                    if access == "load":
                        Y[0] = C[0]  # named: load
                    if access == "own":
                        C[1] = 5
                else:
                    T.signal(C[0], dst=0)  # named

    return program, each(3, 2, 1)


@label("device", RMARACEBENCH("sync: accumulation"), wrong={"one inbox": RaceError}, right=["inboxes", "reduction"])
def sum_of_devices(by):
    """All devices add parts to one element, or send each to its element for adding there, or reduce."""

    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), Y: T.Tensor((3, 8), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((8,), "float32")
                other = T.alloc((8,), "float32")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    if by == "one inbox":
                        T.copy(Y[0, 0:8], other, src=0)  # named
                        for i in T.Parallel(8):
                            tile[i] = tile[i] + other[i]
                        T.copy(tile, Y[0, 0:8], dst=0)  # named
                    if by == "inboxes":
                        T.copy(tile, Y[rank, 0:8], dst=0, signal=F[0])
                        if rank == 0:
                            T.wait(F[0], ">=", size)
                            for peer in T.serial(1, size):
                                T.copy(Y[peer, 0:8], other)
                                for i in T.Parallel(8):
                                    tile[i] = tile[i] + other[i]
                    if by == "reduction":
                        T.allreduce(tile)
                T.copy(tile, X)

    return program, each(3, (8,), (3, 8), 1)


@label("device", RMARACEBENCH("atomic: types"), wrong={"two widths": RaceError}, right=["one width"])
def widths_of_a_counter(types):
    """Two devices count at a third one: both in 32 bits, or one of them in the 64 bits that these are half of."""

    @T.prim_func
    def program(C: T.Tensor((2,), "int32")):
        with T.Kernel(device=3, block=1, threads=1):
            wide = T.view(C, (1,), "int64")
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if rank == 1:
                    T.atomic_add(C[0], 1, dst=0)  # named
                if rank == 2:
                    if types == "one width":
                        T.atomic_add(C[0], 1, dst=0)
                    else:
                        T.atomic_add(wide[0], 1, dst=0)  # named

    return program, each(3, 2)


@label("device", RMARACEBENCH("atomic: domains"), wrong={"of the device": RaceError}, right=["of all devices"])
def scopes_of_a_counter(scope):
    """A device increments a peer's counter, which the peer increments too: with atomics for all, or for its threads
    only.
    """

    @T.prim_func
    def program(C: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=1):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if rank == 1:
                    T.atomic_add(C[0], 1, dst=0)  # named
                else:
                    if scope == "of all devices":
                        T.atomic_add(C[0], 1, dst=0)
                    else:
                        T.atomic_add(C[0], 1)  # named

    return program, each(2, 1)


@label(
    "device",
    RMARACEBENCH("conflict, remote: atomic read"),
    wrong={"store": RaceError, "fetch-add": RaceError},
    right=["load", "atomic load"],
)
def access_beside_an_atomic_load(access):
    """A block loads an element atomically for a peer, while another one of its device uses the element."""

    @T.prim_func
    def program(C: T.Tensor((1,), "int32"), Y: T.Tensor((2,), "int32"), Z: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=1):
            C[0] = 5
        with T.Kernel(device=2, block=2, threads=1) as b:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                seen = T.alloc((1,), "int32")
                if b == 0:
                    if access == "fetch-add":
                        seen[0] = T.atomic_add(C[0], 1, dst=rank, return_prev=True)  # named: fetch-add
                    else:
                        seen[0] = T.atomic_load(C[0], memory_order="relaxed")  # named: store
                    T.copy(seen, Z, dst=1 - rank)
                else:
                    if access == "store":
                        C[0] = 7  # named: store
                    elif access == "atomic load":
                        Y[1] = T.atomic_load(C[0], memory_order="relaxed")
                    else:
                        Y[1] = C[0]  # named: fetch-add

    return program, each(2, 1, 2, 1)


# -- clusters ----------------------------------------------------------------------------------------------------------


@label("cta_cluster", HIRACE("atomics, shared memory"), wrong={"get and put": RaceError}, right=["all-reduce"])
def sum_in_a_cluster(by):
    """Each block adds its row to that of the first block; or all of them reduce."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(cta_cluster=2, block=2, threads=32) as b:
            with T.Scale("block"):
                mine = T.alloc((8,), "float32")
                total = T.alloc((8,), "float32")
                T.copy(X[b, 0], mine)
                T.clear(total)
                T.barrier()
                if by == "get and put":
                    seen = T.alloc((8,), "float32")
                    T.copy(total, seen, src=0)  # named
                    for i in T.Parallel(8):
                        seen[i] = seen[i] + mine[i]
                    T.copy(seen, total, dst=0)  # named
                    T.barrier()
                    T.copy(total, Y[b, 0])
                else:
                    T.allreduce(mine)
                    T.copy(mine, Y[b, 0])

    return program, alone((2, 8), (2, 8))


@label("cta_cluster", SCORD("atomics of a group"), wrong={"plain": RaceError}, right=["atomic"])
def counts_of_clusters(by):
    """The blocks of a cluster count in a place of their cluster in device memory."""

    @T.prim_func
    def program(C: T.Tensor((2,), "int32")):
        with T.Kernel(cta_cluster=2, block=4, threads=1) as b:
            with T.Scale("block"):
                if by == "atomic":
                    T.atomic_add(C[b // 2], 1)
                else:
                    C[b // 2] = C[b // 2] + 1  # named

    return program, alone(2)


# -- blocks ------------------------------------------------------------------------------------------------------------


NUMBERS = torch.tensor([5, 1, 7, 3, 2, 6, 4, 8], dtype=torch.int32)


@label("block", INDIGO("conditional vertex"), wrong={"plain": RaceError, "guard only": RaceError}, right=["atomic"])
def largest_of_all(by):
    """Each block offers its number; a look at the largest so far, or none, before an atomic or a plain update."""

    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), M: T.Tensor((1,), "int32")):
        with T.Kernel(8, threads=1) as b:
            if by == "atomic":
                T.atomic_max(M[0], V[b])
            if by == "plain":
                M[0] = T.max(M[0], V[b])  # named: plain
            if by == "guard only":
                if V[b] > M[0]:  # named: guard only
                    T.atomic_max(M[0], V[b])

    return program, [NUMBERS, *alone(1)]


@label("block", INDIGO("conditional edge"), wrong={"plain": RaceError, "some": RaceError}, right=["atomic"])
def edges_that_go_up(by):
    """Counts edges that lead to a larger vertex; all by atomics, all plainly, or plainly for the last vertex."""

    @T.prim_func
    def program(E: T.Tensor((8,), "int32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(8, threads=1) as edge:
            if E[edge] > 2:
                if by == "atomic":
                    T.atomic_add(C[0], 1)
                if by == "plain":
                    C[0] = C[0] + 1  # named: plain
                if by == "some":
                    if edge == 7:
                        C[0] = C[0] + 1  # named: some
                    else:
                        T.atomic_add(C[0], 1)  # named: some

    return program, [NUMBERS, *alone(1)]


@label("block", INDIGO("populate worklist"), wrong={"plain": RaceError, "read again": RaceError}, right=["atomic"])
def worklist(by):
    """Each block appends its item at an index that the atomic update returns, or that it reads before or after it."""

    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), W: T.Tensor((16,), "int32"), N: T.Tensor((1,), "int32")):
        with T.Kernel(8, threads=1) as b:
            if by == "atomic":
                place = T.atomic_add(N[0], 1, return_prev=True)
                T.atomic_add(W[0], place + V[b])
            if by == "plain":
                W[b] = N[0]
                N[0] = N[0] + 1  # named: plain
            if by == "read again":
                T.atomic_add(N[0], 1)  # named: read again
                W[N[0]] = V[b]  # named: read again

    return program, [NUMBERS, *alone(16, 1)]


@label("block", HIRACE("atomics, global memory"), wrong={"store": RaceError, "read": RaceError}, right=["none"])
def histogram(plain):
    """Blocks count into bins; one of them clears or reads the bins meanwhile."""

    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), H: T.Tensor((9,), "int32"), Y: T.Tensor((9,), "int32")):
        with T.Kernel(9, threads=1) as b:
            if b == 8:
                if plain == "store":
                    H[4] = 0  # named: store
                if plain == "read":
                    for i in T.serial(9):
                        Y[i] = H[i]  # named: read
            else:
                T.atomic_add(H[V[b]], 1)  # named

    return program, [NUMBERS, *alone(9, 9)]


@label("block", SCORD("lock"), wrong={"no lock": RaceError, "relaxed": RaceError}, right=["lock"])
def critical_section(by):
    """A block that holds the ticket updates two elements, and passes the ticket on: by a release, or relaxed."""
    acquire, release = ("relaxed", "relaxed") if by == "relaxed" else ("acquire", "release")

    @T.prim_func
    def program(L: T.Tensor((1,), "int32"), S: T.Tensor((2,), "int32")):
        with T.Kernel(4, threads=1) as b:
            turn = T.alloc_var("int32", init=-1)
            if by != "no lock":
                while turn != b:
                    turn = T.atomic_load(L[0], memory_order=acquire)
            S[0] = S[0] + b  # named
            S[1] = S[1] * 2 + b
            if by != "no lock":
                T.atomic_add(L[0], 1, memory_order=release)

    return program, alone(1, 2)


@label("block", FAIAL("reduction"), wrong={"plain": RaceError}, right=["atomic", "partial sums"])
def sum_of_blocks(by):
    @T.prim_func
    def program(V: T.Tensor((8,), "int32"), P: T.Tensor((8,), "int32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(8, threads=1) as b:
            if by == "plain":
                S[0] = S[0] + V[b]  # named
            if by == "atomic":
                T.atomic_add(S[0], V[b])
            if by == "partial sums":
                P[b] = V[b]
        with T.Kernel(1, threads=1):
            if by == "partial sums":
                for i in T.serial(8):
                    S[0] = S[0] + P[i]

    return program, [NUMBERS, *alone(8, 1)]


# -- warpgroups --------------------------------------------------------------------------------------------------------


@label("warpgroup", HIRACE("atomics, shared memory"), wrong={"plain": RaceError, "one": RaceError}, right=["atomic"])
def count_in_shared_memory(by):
    """Warpgroups count in a place of their block: both by atomics, both plainly, or one of them plainly."""

    @T.prim_func
    def program(Y: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=256):
            count = T.alloc((1,), "int32")
            T.clear(count)
            with T.Scale("warpgroup") as (wg, _):
                if by == "atomic":
                    T.atomic_add(count[0], 1)
                if by == "plain":
                    T.fill(count, wg)  # named: plain
                if by == "one":
                    if wg == 0:
                        T.atomic_add(count[0], 1)  # named: one
                    else:
                        T.fill(count, 1)  # named: one
            Y[0] = count[0]

    return program, alone(1)


@label("warpgroup", FAIAL("reduction in a block"), wrong={"plain": RaceError}, right=["all-reduce", "parts"])
def sum_of_warpgroups(by):
    """Two partial sums become one: added to one tile, left in parts that are added later, or reduced."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=256):
            total = T.alloc((8,), "float32", level="l1")
            parts = T.alloc((2, 8), "float32", level="l1")
            whole = T.alloc((8,), "float32", level="l0")
            T.clear(total)
            with T.Scale("warpgroup") as (wg, _):
                if by == "plain":
                    for i in T.Parallel(8):
                        total[i] = total[i] + X[wg, i]  # named
                if by == "parts":
                    T.copy(X[wg, 0:8], parts[wg, 0:8])
                if by == "all-reduce":
                    T.copy(X[wg, 0:8], T.view(whole, layout=T.Replica))
                    T.allreduce(T.view(whole, layout=T.Replica))
            if by == "plain":
                T.copy(total, Y)
            if by == "parts":
                for i in T.Parallel(8):
                    Y[i] = parts[0, i] + parts[1, i]
            if by == "all-reduce":
                T.copy(whole, Y)

    return program, alone((2, 8), (8,))


@label("warpgroup", RMARACEBENCH("hybrid: atomics"), wrong={"plain": RaceError}, right=["signal"])
def warpgroups_count_at_a_peer(by):
    @T.prim_func
    def program(C: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=256):
            one = T.alloc((1,), "int32")
            T.fill(one, 1)
            with T.Scale("warpgroup"), T.Scale("device") as (rank, _):
                if by == "signal":
                    T.signal(C[0], dst=1 - rank)
                else:
                    T.copy(one, C, dst=1 - rank)  # named

    return program, each(2, 1)


@label("block", INDIGO("conditional edge"), wrong={"load and store": RaceError}, right=["add"])
def count_in_two_steps(by):
    """An atomic load and an atomic store are a step each; between the two another block may count as well."""

    @T.prim_func
    def program(C: T.Tensor((1,), "int32")):
        with T.Kernel(4, threads=1):
            if by == "add":
                T.atomic_add(C[0], 1)
            else:
                seen = T.atomic_load(C[0], memory_order="acquire")
                T.atomic_store(C[0], seen + 1, memory_order="release")  # named

    return program, alone(1)
