# SPDX-License-Identifier: MIT
"""Uninitialized reads: tiles, workspaces and variables, as a whole and in part."""

import re

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.errors import UninitializedReadError


def unwritten(program, args, read, declared=None):
    """The message of the error at the marked lines; the same run without the check ends."""
    with pytest.raises(UninitializedReadError) as caught:
        tilescale.emulate(program, args)
    reads, declares = caught.value.where
    assert (reads.line, reads.what, declares.what) == (line_of(read), "reads here", "declared here")
    assert declared is None or declares.line == line_of(declared)
    tilescale.emulate(program, args, check="races")
    return caught.value.message


@pytest.mark.parametrize("level", ["l0", "l1", "l2"])
def test_a_part_of_a_tile(level):
    def program(rows):
        @T.prim_func
        def program(X: T.Tensor((8, 16), "float32"), Y: T.Tensor((8, 16), "float32")):
            with T.Kernel(device=2, block=1, threads=64):
                tile = T.alloc((8, 16), "float32", level=level)  # a tile
                with T.Scale("block"):
                    T.copy(X[0:rows, 0:16], tile[0:rows, 0:16])
                    T.copy(tile, Y)  # all of it

        return program

    def args():
        return [[torch.ones(8, 16), torch.zeros(8, 16)] for _ in range(2)]

    message = unwritten(program(5), args(), "all of it", "a tile")
    assert message == "device 0, block 0 reads tile[5:8, 0:16], which is uninitialized"
    tilescale.emulate(program(8), args())


def test_elements_that_a_guard_leaves_out():
    def program(limit):
        @T.prim_func
        def program(Y: T.Tensor((4, 4), "int32")):
            with T.Kernel(1, threads=32):
                tile = T.alloc_shared((4, 4), "int32")
                for i, j in T.Parallel(4, 4):
                    if i + j < limit:
                        tile[i, j] = i
                for i, j in T.Parallel(4, 4):
                    if i + j < 5:
                        Y[i, j] = tile[i, j]  # read under a guard

        return program

    args = [torch.zeros(4, 4, dtype=torch.int32)]
    assert "tile[1:4, 1:4]" in unwritten(program(4), args, "read under a guard")
    tilescale.emulate(program(5), args)


@pytest.mark.parametrize("clears", [False, True])
def test_a_product_that_adds_to_nothing(clears):
    @T.prim_func
    def program(A: T.Tensor((32, 32), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")  # accumulator
            T.copy(A, a)
            if clears:
                T.clear(c)
            T.gemm(a, a, c)  # adds to it
            T.copy(c, C)

    args = [torch.ones(32, 32, dtype=torch.float16), torch.zeros(32, 32)]
    if clears:
        tilescale.emulate(program, args)
    else:
        assert "c[0:32, 0:32]" in unwritten(program, args, "adds to it", "accumulator")


def test_counts_in_shared_memory_that_nobody_cleared():
    def program(clear):
        @T.prim_func
        def program(X: T.Tensor((64,), "int32"), H: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=64):
                tx = T.get_thread_binding()
                counts = T.alloc_shared((4,), "int32")
                if clear:
                    T.clear(counts)
                T.atomic_add(counts[X[tx]], 1)  # counts up
                T.sync_threads()
                if tx < 4:
                    H[tx] = counts[tx]

        return program

    args = [torch.arange(64, dtype=torch.int32) % 4, torch.zeros(4, dtype=torch.int32)]
    assert "counts[0:4]" in unwritten(program(False), args, "counts up")
    tilescale.emulate(program(True), args)


def test_an_atomic_store_is_a_first_write():
    @T.prim_func
    def program(Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((32,), "int32")
            T.atomic_store(tile[tx], tx)
            Y[tx] = tile[tx]

    tilescale.emulate(program, [torch.zeros(32, dtype=torch.int32)])


def test_flags_in_a_workspace_that_nobody_cleared():
    @T.prim_func
    def program(X: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, threads=32):
            flags = T.alloc((4,), "int32", level="l2")
            with T.Scale("device") as (rank, size):
                T.signal(flags[rank], dst=1 - rank)  # a signal

    message = unwritten(program, [[torch.zeros(4, dtype=torch.int32)] for _ in range(2)], "a signal")
    assert message == "device 0 reads flags[0] of device 1, which is uninitialized"


def test_a_variable_that_some_threads_have_not_set():
    def program(bound):
        @T.prim_func
        def program(Y: T.Tensor((64,), "int32")):
            with T.Kernel(1, threads=64):
                tx = T.get_thread_binding()
                mine = T.alloc_local((2,), "int32")
                if tx < bound:
                    mine[1] = tx
                Y[tx] = mine[1]  # its own

        return program

    args = [torch.zeros(64, dtype=torch.int32)]
    assert "mine[1]" in unwritten(program(63), args, "its own")
    tilescale.emulate(program(64), args)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "all_to_all"])
def test_what_a_collective_fills_need_not_be_written(name):
    shapes = {"reduce_scatter": (4, 2), "all_gather": (2, 4), "all_to_all": (4, 4)}

    def program(clear):
        n, m = shapes[name]

        @T.prim_func
        def program(Y: T.Tensor((m,), "float32")):
            with T.Kernel(device=2, block=1, threads=32):
                with T.Scale("block"):
                    given = T.alloc((n,), "float32")
                    result = T.alloc((m,), "float32")
                    if clear:
                        T.clear(given)
                    with T.Scale("device"):
                        getattr(T, name)(given, result)  # loads a tile
                    T.copy(result, Y)

        return program

    def args():
        return [[torch.zeros(shapes[name][1])] for _ in range(2)]

    with pytest.raises(UninitializedReadError, match=re.escape(f"given[0:{shapes[name][0]}]")):
        tilescale.emulate(program(False), args())
    tilescale.emulate(program(True), args())


def test_only_the_root_of_a_broadcast_has_to_have_something():
    def program(writes):
        @T.prim_func
        def program(Y: T.Tensor((4,), "float32")):
            with T.Kernel(device=3, block=1, threads=32):
                with T.Scale("block"):
                    tile = T.alloc((4,), "float32")
                    with T.Scale("device") as (rank, _):
                        if rank == writes:
                            T.fill(tile, 2)
                        T.broadcast(tile, root=1)
                    T.copy(tile, Y)

        return program

    args = [[torch.zeros(4)] for _ in range(3)]
    tilescale.emulate(program(1), args)
    assert all((y == 2).all() for (y,) in args)
    with pytest.raises(UninitializedReadError, match="device 1, block 0 reads tile"):
        tilescale.emulate(program(0), args)


def test_a_peer_that_has_not_written_yet():
    """Without the check for races the order decides whether the tile is there."""

    @T.prim_func
    def program(Y: T.Tensor((4,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            box = T.alloc((4,), "float32", level="l2")
            with T.Scale("block"):
                tile = T.alloc((4,), "float32")
                T.clear(tile)
                with T.Scale("device") as (rank, _):
                    if rank == 1:
                        T.copy(tile, box, dst=0)
                T.copy(box, tile)
                T.copy(tile, Y)

    with pytest.raises(UninitializedReadError, match=r"device 0, block 0 reads box\[0:4\]"):
        tilescale.emulate(program, [[torch.zeros(4)] for _ in range(2)], check="uninitialized")


def hint(program, args):
    with pytest.raises(UninitializedReadError) as caught:
        tilescale.emulate(program, args)
    return caught.value.hint


@pytest.mark.usefixtures("remedies")
def test_an_inbox_that_nobody_waits_for():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(device=2, block=1, threads=64):
            inbox, told = T.alloc((64,), "float32", "l2"), T.alloc_flags((1,), "int32")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X, inbox, dst=1 - rank, signal=told[0])  # to a peer
                T.copy(inbox, Y)

    advice = hint(program, [[torch.ones(64), torch.zeros(64)] for _ in range(2)])
    assert advice.startswith('add T.wait(told[0], ">=", 1) before line ')
    assert f"line {line_of('to a peer')} writes inbox from another unit: wait before it is read" in advice


def test_a_workspace_of_all_blocks():
    @T.prim_func
    def program(X: T.Tensor((2, 64), "float32")):
        with T.Kernel(device=1, block=2, threads=64) as bx:
            both = T.alloc((2, 64), "float32", "l2")
            T.copy(X[bx, 0:64], both[bx, 0:64])  # each its own
            T.copy(both[1 - bx, 0:64], X[bx, 0:64])

    advice = hint(program, [torch.ones(2, 64)])
    assert advice.startswith(f"line {line_of('each its own')} writes both in each block; order it before this read:")
    assert 'T.barrier() in T.Scale("block")' in advice


def test_a_tile_of_its_own_that_is_written_later():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((64,), "float32")
            T.copy(tile, X)
            T.clear(tile)

    assert hint(program, [torch.ones(64)]).startswith("write tile before it is read: T.clear")


def test_a_name_that_nobody_uses_reads_nothing():
    @T.prim_func
    def program(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((64,), "int32")
            third = tile[3]  # noqa: F841 - an alias
            beyond = X[100]  # noqa: F841 - outside of X
            T.copy(X, tile)
            T.copy(tile, Y)

    args = [torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]
    tilescale.emulate(program, args)
    assert torch.equal(*args)


def test_a_variable_begins_as_zero_and_an_array_as_nothing():
    """As in stock TileLang's text, where a variable is set to 0 once, in front of all loops."""

    @T.prim_func
    def program(Y: T.Tensor((3,), "int32"), F: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=1):
            for k in T.serial(3):
                total, part = T.alloc_var(T.int32), T.alloc_var(T.float32)
                total = total + k
                Y[k] = total
                F[0] = part

    args = [torch.full((3,), 9, dtype=torch.int32), torch.ones(1)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [0, 1, 3] and args[1].tolist() == [0]
