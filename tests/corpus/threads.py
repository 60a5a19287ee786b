# SPDX-License-Identifier: MIT
"""Races between threads of one block on device memory, in plain TileLang, which inserts no order there."""

import tilescale.language as T
from tests.corpus.record import FAIAL, HIRACE, INDIGO, SIMULEE, Kind, alone
from tilescale.errors import RaceError

label = Kind("race of threads")


@label(
    "thread",
    INDIGO("read-write conflicts of threads"),
    wrong=dict.fromkeys(["next", "reversed"], RaceError),
    right=["own", "constant"],
)
def elements_of_iterations(element):
    """Each iteration of a parallel loop changes an element, and loads one that another iteration changes, or not."""

    @T.prim_func
    def program(X: T.Tensor((129,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                if element == "next":
                    X[i] = X[i + 1] + 1  # named: next
                if element == "reversed":
                    X[i] = X[127 - i] + 1  # named: reversed
                if element == "own":
                    X[i] = X[i] + 1
                if element == "constant":
                    X[i] = X[128] + 1

    return program, alone((129,))


@label("thread", FAIAL("two writes"), wrong={"overlap": RaceError}, right=["apart", "one thread"])
def loops_that_store(part):
    """Two loops store to the same elements, by other threads; or to others; or by one thread in order."""
    first = 16 if part == "overlap" else 64

    @T.prim_func
    def program(X: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=64):
            if part == "one thread":
                if T.get_thread_binding() == 0:
                    X[0] = 1.0
                    X[0] = 2.0
            else:
                for i in T.Parallel(64):
                    X[i] = 1.0  # named
                for i in T.Parallel(64):
                    X[first + i] = 2.0  # named

    return program, alone((128,))


@label("thread", SIMULEE("race in device memory"), wrong={"other": RaceError}, right=["own", "block"])
def counters(who):
    """All threads add to an element: without atomics, to one common element; to one each; or one thread for all."""

    @T.prim_func
    def program(X: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            if who == "other":
                X[0] = X[0] + 1  # named
            if who == "own":
                X[tx] = X[tx] + 1
            if who == "block":
                if tx == 0:
                    X[0] = X[0] + 1

    return program, alone(32)


@label(
    "thread",
    HIRACE("global memory, missing barrier of the block"),
    wrong={"nothing": RaceError, "before": RaceError, "of warps": RaceError},
    right=["threads", "shared memory", "vote"],
)
def workspace_of_a_block(order):
    """A block keeps a row in device memory and reads it backwards."""

    @T.prim_func
    def program(X: T.Tensor((2, 64), "float32"), W: T.Tensor((2, 64), "float32"), Y: T.Tensor((2, 64), "float32")):
        with T.Kernel(2, threads=64) as b:
            tile = T.alloc_shared((64,), "float32")
            tx = T.get_thread_binding()
            if order == "before":
                T.sync_threads()
            for i in T.Parallel(64):
                W[b, i] = 2 * X[b, i]  # named
            if order == "of warps":
                Y[b, tx] = T.shfl_xor(X[b, tx], 1)
            if order == "threads":
                T.sync_threads()
            if order == "vote":
                Y[b, tx] = T.cast(T.syncthreads_count(1), "float32")
            if order == "shared memory":
                tile[tx] = X[b, tx]
                Y[b, tx] = tile[63 - tx]
            for i in T.Parallel(64):
                Y[b, i] = W[b, 63 - i]  # named

    return program, alone((2, 64), (2, 64), (2, 64))


@label("thread", SIMULEE("missing barrier"), wrong={"nothing": RaceError}, right=["barrier"])
def element_of_the_first_thread(order):
    """One thread finds out what all of them need."""

    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), W: T.Tensor((1,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            if T.get_thread_binding() == 0:
                W[0] = X[0] + X[63]  # named
            if order == "barrier":
                T.sync_threads()
            for i in T.Parallel(64):
                Y[i] = X[i] / W[0]  # named

    return program, alone((64,), (1,), (64,))


@label(
    "thread",
    FAIAL("loops with barriers"),
    wrong={"none": RaceError, "first only": RaceError, "second only": RaceError},
    right=["both"],
)
def steps_of_a_stencil(barriers):
    """Each step reads the neighbours of the last one, in one workspace."""

    @T.prim_func
    def program(X: T.Tensor((66,), "float32"), Y: T.Tensor((66,), "float32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for _ in T.serial(3):
                Y[tx + 1] = X[tx] + X[tx + 2]  # named
                if barriers in ("first only", "both"):
                    T.sync_threads()
                X[tx + 1] = Y[tx + 1]  # named
                if barriers in ("second only", "both"):
                    T.sync_threads()

    return program, alone((66,), (66,))


@label("thread", HIRACE("tiles in registers"), wrong={"nothing": RaceError}, right=["barrier", "same rows"])
def tile_that_goes_out_and_in(order):
    """A tile is stored, and loaded a row further on, so by other threads."""
    first = 0 if order == "same rows" else 1

    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32"), W: T.Tensor((5, 64), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_fragment((4, 64), "float32")
            T.copy(X, tile)
            T.copy(tile, W[0, 0])  # named
            if order == "barrier":
                T.sync_threads()
            T.copy(W[first, 0], tile)  # named
            T.copy(tile, X)

    return program, alone((4, 64), (5, 64))


@label(
    "thread",
    INDIGO("read-write conflicts of threads"),
    wrong=dict.fromkeys(["next", "reversed", "two loops' worth", "device memory"], RaceError),
    right=["own", "other tile", "barrier", "two loops"],
)
def iterations_in_a_unit(use):
    """The iterations of a parallel loop in a scale use elements that others store, or not."""
    threads = 32 if use == "two loops' worth" else 64

    @T.prim_func
    def program(X: T.Tensor((65,), "float32"), W: T.Tensor((65,), "float32"), Y: T.Tensor((65,), "float32")):
        with T.Kernel(device=1, block=1, threads=threads), T.Scale("block"):
            t = T.alloc_shared((65,), "float32")
            u = T.alloc_shared((65,), "float32")
            T.copy(X, t)
            if use == "next":
                for i in T.Parallel(64):
                    t[i] = t[i + 1] + 1  # named: next
            if use == "reversed":
                for i in T.Parallel(64):
                    t[i] = t[63 - i] + 1  # named: reversed
            if use == "two loops' worth" or use == "barrier":
                for i in T.Parallel(64):
                    u[i] = t[i] + 1  # named: two loops' worth
                    Y[i] = u[63 - i]  # named: two loops' worth
            if use == "device memory":
                for i in T.Parallel(64):
                    W[i] = t[i] + 1  # named: device memory
                    Y[i] = W[63 - i]  # named: device memory
            if use == "own":
                for i in T.Parallel(64):
                    t[i] = t[i] + t[64]
            if use == "other tile":
                for i in T.Parallel(64):
                    u[i] = t[63 - i]
            if use == "two loops":
                for i in T.Parallel(64):
                    W[i] = t[i] + 1
                for i in T.Parallel(64):
                    Y[i] = W[63 - i]

    return program, alone((65,), (65,), (65,))


@label(
    "thread",
    FAIAL("two writes"),
    wrong=dict.fromkeys(["values", "statements"], RaceError),
    right=["one value", "atomic", "one of them"],
)
def iterations_that_store(what):
    """Two iterations of a parallel loop store to one element."""

    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(device=1, block=1, threads=64), T.Scale("block"):
            for i in T.Parallel(64):
                if what == "values":
                    Y[i // 2] = X[i]  # named: values
                if what == "statements":
                    Y[i] = 1.0  # named: statements
                    Y[63 - i] = 2.0  # named: statements
                if what == "one value":
                    Y[i // 2] = X[0]
                if what == "atomic":
                    T.atomic_add(Y[i // 2], X[i])
                if what == "one of them":
                    if i % 2 == 0:
                        Y[i // 2] = X[i]

    return program, alone((64,), (64,))
