# SPDX-License-Identifier: MIT
"""Below the program: warpgroups, warps and threads as units, roles among them, views of tiles."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import assert_same, blank, values


def ints(*shape):
    return torch.full(shape, -7, dtype=torch.int32)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_ranks_are_among_siblings_and_nest():
    @T.prim_func
    def program(R: T.Tensor((384, 5), "int32")):
        with T.Kernel(1, threads=384):
            tx = T.get_thread_binding()
            with T.Scale("warpgroup") as (wg, wgs):
                with T.Scale("warp") as (w, ws):
                    with T.Scale("thread") as (lane, lanes):
                        R[tx, 0] = wg
                        R[tx, 1] = w
                        R[tx, 2] = lane
                        R[tx, 3] = wgs * 10000 + ws * 100 + lanes
            R[tx, 4] = T.rank("warp")

    args = [ints(384, 5)]
    tilescale.emulate(program, args)
    t = torch.arange(384)
    expected = torch.stack([t // 128, t // 32 % 4, t % 32, torch.full_like(t, 30432), t // 32], 1)
    assert_same(args[0], expected.int())


def test_a_warp_outside_a_warpgroup_counts_in_the_program():
    @T.prim_func
    def program(R: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warp") as (w, ws):
                R[w] = w * 100 + ws

    args = [ints(8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [w * 100 + 8 for w in range(8)]


def test_roles_by_rank_with_a_named_barrier_between_them():
    """Warpgroup 0 produces tiles, the others consume: order comes from mbarriers alone."""
    steps = 5

    @T.prim_func
    def program(X: T.Tensor((steps, 16), "float32"), Y: T.Tensor((2, steps, 16), "float32")):
        with T.Kernel(1, threads=384):
            tile = T.alloc_shared((16,), "float32")
            full = T.alloc_barrier(128)
            empty = T.alloc_barrier(256)
            with T.Scale("warpgroup") as (wg, _):
                if wg == 0:
                    for k in T.serial(steps):
                        T.barrier_wait(empty, (k & 1) ^ 1)
                        T.copy(X[k, 0], tile)
                        T.barrier_arrive(full)
                else:
                    for k in T.serial(steps):
                        T.barrier_wait(full, k & 1)
                        for i in T.Parallel(16):
                            Y[wg - 1, k, i] = tile[i] * wg
                        T.barrier_arrive(empty)

    x = values(1, steps, 16)
    args = [x, blank(2, steps, 16)]
    tilescale.emulate(program, args)
    assert_same(args[1], torch.stack([x, x * 2]))


def test_a_scale_under_a_condition_on_the_thread_runs_on_the_units_that_meet_it():
    """Warps keep their numbers, whether the others skip the region, take the other side, or left the loop before."""

    @T.prim_func
    def program(Y: T.Tensor((3, 8), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            if tx >= 96:
                with T.Scale("warp") as (w, ws):
                    Y[0, w] = w * 100 + ws
            if tx < 128:
                with T.Scale("warp") as (w, ws):
                    Y[1, w] = w
                    T.sync_threads()
            else:
                with T.Scale("warp") as (w, ws):
                    Y[1, w] = -w
                    T.sync_threads()
            for k in T.serial(4):
                with T.Scale("warp") as (w, _):
                    if k > w % 4:
                        T.loop_break()
                    Y[2, w] = k * 10 + w

    args = [ints(3, 8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [
        [w * 100 + 8 if w >= 3 else -7 for w in range(8)],
        [w if w < 4 else -w for w in range(8)],
        [w % 4 * 10 + w for w in range(8)],
    ]


def test_barrier_among_warps_orders_their_writes():
    @T.prim_func
    def program(Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=256):
            slots = T.alloc_shared((8,), "int32")
            with T.Scale("warp") as (w, ws):
                slots[w] = w * w
                T.barrier()
                Y[w] = slots[(w + 3) % ws]

    args = [ints(8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [((w + 3) % 8) ** 2 for w in range(8)]


def test_barrier_of_nested_warps_is_that_of_their_warpgroup():
    """Only warpgroup 1's warps synchronize; warpgroup 0's never do."""

    @T.prim_func
    def program(Y: T.Tensor((2, 4), "int32")):
        with T.Kernel(1, threads=256):
            slots = T.alloc_shared((2, 4), "int32")
            with T.Scale("warpgroup") as (wg, _):
                if wg == 1:
                    with T.Scale("warp") as (w, ws):
                        slots[wg, w] = w + 10
                        T.barrier()
                        Y[wg, w] = slots[wg, (w + 1) % ws]

    args = [ints(2, 4)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [[-7] * 4, [11, 12, 13, 10]]


# -- views -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["l0", "l1"])
@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (T.FullRow, lambda r, c: r // 4),
        (T.FullCol, lambda r, c: c // 4),
        (T.Shard(1), lambda r, c: c // 4),
        (T.Shard(-2), lambda r, c: r // 4),
        (T.Shard(0, block=1), lambda r, c: r % 2),
        (lambda i, j: j % 2, lambda r, c: c % 2),
        (lambda i, j: i // 4, lambda r, c: r // 4),
    ],
    ids=["rows", "columns", "dim 1", "dim -2", "cyclic rows", "cyclic columns by function", "rows by function"],
)
def test_each_warpgroup_writes_its_part(layout, expected, scope):
    rows, columns = 8, 8

    @T.prim_func
    def program(Y: T.Tensor((rows, columns), "int32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((rows, columns), "int32", level=scope)
            with T.Scale("warpgroup") as (wg, _):
                part = T.view(tile, layout=layout)
                T.fill(part, wg)
            T.copy(tile, Y)

    args = [ints(rows, columns)]
    tilescale.emulate(program, args)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    assert_same(args[0], expected(r, c))


def test_view_of_a_slice_and_view_of_a_view():
    """Rows 2..5 of a tile over two warpgroups, and of each half the columns over its four warps."""

    @T.prim_func
    def program(Y: T.Tensor((8, 8), "int32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((8, 8), "int32")
            T.fill(tile, -1)
            with T.Scale("warpgroup") as (wg, _):
                half = T.view(tile[2:6, 0:8], layout=T.FullRow)
                with T.Scale("warp") as (w, _):
                    T.fill(T.view(half, layout=T.FullCol), wg * 10 + w)
            T.copy(tile, Y)

    args = [ints(8, 8)]
    tilescale.emulate(program, args)
    expected = torch.full((8, 8), -1)
    for r in range(2, 6):
        for c in range(8):
            expected[r, c] = (r - 2) // 2 * 10 + c // 2
    assert_same(args[0], expected)


def test_replicas_are_apart_until_a_collective_makes_them_one():
    @T.prim_func
    def program(Y: T.Tensor((2, 16), "float32"), Z: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=256):
            acc = T.alloc_fragment((16,), "float32")
            T.fill(acc, 1)
            with T.Scale("warpgroup") as (wg, _):
                mine = T.view(acc, layout=T.Replica)
                for i in T.Parallel(16):
                    mine[i] += wg * 100 + i
                T.copy(mine, Y[wg, 0])
            with T.Scale("warpgroup"):
                T.allreduce(T.view(acc, layout=T.Replica))
            T.copy(acc, Z)

    args = [blank(2, 16), blank(16)]
    tilescale.emulate(program, args)
    i = torch.arange(16.0)
    assert_same(args[0], torch.stack([1 + i, 101 + i]))
    assert_same(args[1], 102 + 2 * i)


def test_replicas_are_fresh_after_the_tile_was_written():
    """A replica that another step's write made old must not come back, neither to read nor into the tile."""

    @T.prim_func
    def program(X: T.Tensor((3, 16), "float32"), Y: T.Tensor((3, 2, 16), "float32"), Z: T.Tensor((3, 16), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((16,), "float32")
            for k in T.serial(3):
                T.copy(X[k, 0], tile)
                with T.Scale("warpgroup") as (wg, _):
                    if k != 1:
                        mine = T.view(tile, layout=T.Replica)
                        for i in T.Parallel(16):
                            mine[i] = mine[i] * 2 + wg
                        T.copy(mine, Y[k, wg, 0])
                T.copy(tile, Z[k, 0])

    x = values(1, 3, 16)
    args = [x, blank(3, 2, 16), blank(3, 16)]
    tilescale.emulate(program, args, check="races")
    for k in (0, 2):
        assert_same(args[1][k], torch.stack([x[k] * 2, x[k] * 2 + 1]))
        assert_same(args[2][k], x[k] * 2)  # unit 0's copy
    assert_same(args[2][1], x[1])


def test_replicas_are_fresh_after_a_write_through_another_view():
    @T.prim_func
    def program(X: T.Tensor((3, 16), "float32"), Y: T.Tensor((3, 2, 16), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((16,), "float32")
            for k in T.serial(3):
                with T.Scale("warpgroup") as (wg, _):
                    half = T.view(tile, layout=T.FullRow)
                    T.copy(X[k, wg * 8], half)
                    T.all_gather(half)
                with T.Scale("warpgroup") as (wg, _):
                    whole = T.view(tile, layout=T.Replica)
                    T.copy(whole, Y[k, wg, 0])

    x = values(1, 3, 16)
    args = [x, blank(3, 2, 16)]
    tilescale.emulate(program, args)
    assert_same(args[1], torch.stack([x, x], 1))


def test_a_replica_of_a_part_goes_back_to_that_part():
    @T.prim_func
    def program(Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((8,), "int32")
            T.fill(tile, 5)
            with T.Scale("warpgroup") as (wg, _):
                half = T.view(tile, layout=T.FullRow)
                mine = T.view(half, layout=T.Replica)
                for i in T.Parallel(4):
                    mine[i] += wg * 10 + i
            T.copy(tile, Y)

    args = [ints(8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [5, 6, 7, 8, 15, 16, 17, 18]
