# SPDX-License-Identifier: MIT
"""Reads of an overlapped reduction's result in the same program: no barrier at its end replaces waits."""

import torch

import tilescale.language as T
from tests.overlap.support import H200, check_leaves, check_same, overlapped
from tilescale.passes.overlap.rewrite import overlap


def test_a_grid_behind_an_all_reduce_by_tiles_sees_the_sums_of_all_devices():
    """Peers write them, so it waits for them; each block reads rows that another device has summed."""
    devices, rows, tile = 3, 4, 4
    whole = (devices * rows, 4)

    @T.prim_func
    def reduce_then_read(X: T.Tensor(whole, "float32"), Y: T.Tensor(whole, "float32"), Z: T.Tensor(whole, "float32")):
        with T.Kernel(device=devices, block=devices * rows // tile, threads=32) as b:
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((tile, 4), "float32", level="l1")
                T.copy(X[b * tile, 0], x)
                for i, j in T.Parallel(tile, 4):
                    x[i, j] = x[i, j] + x[i, j]
                T.copy(x, Y[b * tile, 0])
            with T.Scale("device"):
                T.allreduce(Y)
            with T.Scale("device"), T.Scale("block"):
                y = T.alloc((tile, 4), "float32", level="l1")
                T.copy(Y[b * tile, 0], y)
                T.copy(y, Z[b * tile, 0])

    changed, schedule = overlapped(reduce_then_read, chunk=4, carrier="tiles")
    (move,) = schedule.moves
    assert move.overlapped and move.adds == "tiles"
    rng = torch.Generator().manual_seed(0)
    args = [[torch.randn(whole, generator=rng), *(torch.full(whole, 113.0) for _ in range(2))] for _ in range(devices)]
    total = sum((x + x for x, *_ in args[1:]), start=args[0][0] + args[0][0])
    check_leaves(changed, args, [[x, total, total] for x, *_ in args], seeds=(None, 1, 2))


def test_parts_that_are_read_later_hold_local_tiles_too():
    @T.prim_func
    def f(X: T.Tensor((16, 4), "float32"), Y: T.Tensor((8, 4), "float32"), Z: T.Tensor((16, 4), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as block:
            parts = T.alloc((16, 4), "float32", level="l2")
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((4, 4), "float32", level="l1")
                T.copy(X[block * 4, 0], x)
                T.copy(x, parts[block * 4, 0])
            with T.Scale("device"):
                T.reduce_scatter(parts, Y)
            with T.Scale("device"), T.Scale("block"):
                again = T.alloc((4, 4), "float32", level="l1")
                T.copy(parts[block * 4, 0], again)
                T.copy(again, Z[block * 4, 0])

    changed, schedule = overlapped(f, carrier="queue")
    assert schedule.moves[0].overlapped and "a separate grid accumulates: the parts" in schedule.moves[0].why
    args = [[torch.randn(16, 4), torch.full((8, 4), torch.nan), torch.full((16, 4), torch.nan)] for _ in range(2)]
    check_same(f, changed, args, seeds=(None,))
    assert not overlapped(f, carrier="tiles")[1].moves[0].overlapped


def test_a_result_that_the_producer_grid_reads_is_summed_behind_it():
    """Otherwise a tile could add up where another block still reads what the result was before."""

    @T.prim_func
    def f(X: T.Tensor((16, 4), "float32"), Y: T.Tensor((8, 4), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as block:
            parts = T.alloc((16, 4), "float32", level="l2")
            with T.Scale("device"), T.Scale("block"):
                x, before = (T.alloc((4, 4), "float32", level="l1") for _ in range(2))
                T.copy(X[block * 4, 0], x)
                T.copy(Y[block % 2 * 4, 0], before)
                for i, j in T.Parallel(4, 4):
                    x[i, j] = x[i, j] + before[i, j]
                T.copy(x, parts[block * 4, 0])
            with T.Scale("device"):
                T.reduce_scatter(parts, Y)

    changed, schedule = overlapped(f, carrier="queue")
    (move,) = schedule.moves
    assert move.overlapped and move.adds == "grid"
    args = [[torch.randn(16, 4), torch.randn(8, 4)] for _ in range(2)]
    check_same(f, changed, args, seeds=(None, 1))
    estimated, move.overlapped_s = move.overlapped_s, None
    assert overlap(f, H200, schedule)[1].moves[0].overlapped_s == estimated, "that grid is a part of the estimate"
