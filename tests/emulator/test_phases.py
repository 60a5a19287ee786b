# SPDX-License-Identifier: MIT
"""Phases: device statements and grids in order, loops around them, several launches, workspaces, residency."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import OPS, WORLDS, assert_rounded, assert_same, blank, values, wide


@pytest.mark.parametrize("size", [2, 3, 4])
def test_products_with_shifting_operands(size):
    """A ring of devices, each with a row of A and of C: B's shards travel round, one GEMM a step (1-D Cannon)."""
    m, n, k = 32, 24, 8

    @T.prim_func
    def program(
        A: T.Tensor((m, k * size), "float32"),
        B: T.Tensor((k, n), "float32"),
        C: T.Tensor((m, n), "float32"),
    ):
        with T.Kernel(device=size, block=(T.ceildiv(n, 16), T.ceildiv(m, 16)), threads=32) as (bx, by):
            with T.Scale("device") as (rank, _):
                here = T.alloc((k, n), "float32", level="l2")
                there = T.alloc((k, n), "float32", level="l2")
                T.copy(B, here)
                for step in T.serial(size):
                    with T.Scale("block"):
                        a = T.alloc((16, k), "float32")
                        b = T.alloc((k, 16), "float32")
                        c = T.alloc((16, 16), "float32", level="l0")
                        T.copy(A[by * 16, (rank + step) % size * k], a)
                        T.copy(here[0, bx * 16], b)
                        T.copy(C[by * 16, bx * 16], c)
                        T.gemm(a, b, c)
                        T.copy(c, C[by * 16, bx * 16])
                    T.copy(here, there, dst=(rank + size - 1) % size)
                    T.barrier()
                    T.copy(there, here)
                    T.barrier()

    a, b = [values(r, m, k * size) for r in range(size)], values(99, k * size, n)
    args = [[a[r].clone(), b[r * k : (r + 1) * k].clone(), torch.zeros(m, n)] for r in range(size)]
    tilescale.emulate(program, args)
    for r, (_, _, c) in enumerate(args):
        # float32 GEMMs run in tfloat32 on this machine: 10 bits of mantissa
        torch.testing.assert_close(c.double(), a[r].double() @ b.double(), rtol=2e-3, atol=2e-2)


def test_two_kernels_with_barriers_and_tiles_of_their_own():
    """Each launch has its own mbarrier and tiles of the same names; the second reads what the first left."""

    @T.prim_func
    def program(X: T.Tensor((6, 32), "float32"), Y: T.Tensor((6, 32), "float32")):
        with T.Kernel(device=2, block=6, threads=64) as b:
            with T.Scale("block"):
                tile = T.alloc((32,), "float32")
                ready = T.alloc_barrier(64)
                T.copy(X[b, 0], tile)
                T.barrier_arrive(ready)
                T.barrier_wait(ready, 0)
                with T.Scale("device"):
                    T.allreduce(tile)
                T.copy(tile, X[b, 0])
        with T.Kernel(device=2, block=(2, 3), threads=32) as (bx, by):
            with T.Scale("block"):
                tile = T.alloc((2, 16), "float32")
                T.copy(X[by * 2, bx * 16], tile)
                for i, j in T.Parallel(2, 16):
                    tile[i, j] = tile[i, j] + 1
                T.copy(tile, Y[by * 2, bx * 16])

    sources = [values(r, 6, 32) for r in range(2)]
    args = [[x.clone(), blank(6, 32)] for x in sources]
    tilescale.emulate(program, args)
    for _, y in args:
        assert_rounded(y, OPS["sum"]([wide(x) for x in sources]) + 1)


def test_workspaces_live_across_phases_and_belong_to_each_device():
    world, n = 3, 20

    @T.prim_func
    def program(X: T.Tensor((n,), "int32"), Y: T.Tensor((n,), "int32")):
        with T.Kernel(device=world, block=4, threads=32) as b:
            with T.Scale("device") as (rank, size):
                work = T.alloc((n,), "int32", level="l2")
                T.fill(work, 100)
            with T.Scale("block"):
                for i in T.Parallel(5):
                    work[b * 5 + i] += X[b * 5 + i]
            with T.Scale("device"):
                T.copy(work, Y, dst=(rank + 1) % size)

    args = [[values(r, n, dtype="int32"), blank(n, dtype="int32")] for r in range(world)]
    tilescale.emulate(program, args)
    for r, (_, y) in enumerate(args):
        assert_same(y, args[r - 1][0] + 100)


def test_puts_into_a_workspace_that_its_owner_has_not_reached():
    """Device 1 waits in the first launch for what device 0 puts in the second; extents are known at launch only."""
    n = T.dynamic("n")

    @T.prim_func
    def program(X: T.Tensor((n,), "int32"), Y: T.Tensor((n,), "int32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=32) as _:
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    if rank == 1:
                        T.wait(F[0], ">=", 1)
        with T.Kernel(device=2, block=1, threads=32) as _:
            with T.Scale("device") as (rank, _):
                work = T.alloc((n,), "int32", level="l2")
            with T.Scale("block"):
                tile = T.alloc((4,), "int32")
                T.copy(X[0:4], tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, work[0:4], dst=1 - rank, signal=F[0])
                    T.wait(F[0], ">=", 1)
                T.copy(work[0:4], Y[0:4])

    args = [[values(r, 4, dtype="int32"), blank(4, dtype="int32"), blank(1, dtype="int32") * 0] for r in range(2)]
    tilescale.emulate(program, args)
    for r, (_, y, _) in enumerate(args):
        assert_same(y, args[1 - r][0])


def test_branches_and_while_loops_around_phases():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(device=2, block=2, threads=32) as b:
            with T.Scale("device") as (rank, _):
                count = T.alloc((1,), "int32", level="l2")
                count[0] = 0
                while count[0] < n:
                    if count[0] % 2 == 0:
                        with T.Scale("block"):
                            for i in T.Parallel(4):
                                X[b * 4 + i] += 1
                    else:
                        with T.Scale("block"):
                            for i in T.Parallel(4):
                                X[b * 4 + i] *= 3
                        T.allreduce(X)
                    count[0] += 1

    sources = [values(r, 8, dtype="int32") for r in range(2)]
    args = [[x.clone(), 4] for x in sources]
    tilescale.emulate(program, args)
    total = sum((wide(x) + 1) * 3 for x in sources)
    for x, _ in args:
        assert_same(x, (total + 1) * 3 * 2)


@pytest.mark.parametrize(("m", "n", "k", "world"), [(70, 50, 90, 3), (33, 17, 40, 2), (16, 16, 16, 1), (5, 100, 64, 8)])
def test_product_whose_tiles_do_not_divide_it(m, n, k, world):
    """K is split over the devices by views of global tensors, tiles of 32 x 16 x 16 hang over every edge."""
    shard = -(-k // world)
    k = shard * world

    @T.prim_func
    def program(A: T.Tensor((m, k), "bfloat16"), B: T.Tensor((k, n), "bfloat16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(device=world, block=(T.ceildiv(n, 16), T.ceildiv(m, 32)), threads=128) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                C_dev = T.view(C, layout=T.Replica)
            with T.Scale("block"):
                a = T.alloc((32, 16), "bfloat16")
                b = T.alloc((16, 16), "bfloat16")
                c = T.alloc((32, 16), "float32", level="l0")
                T.clear(c)
                for i in T.Pipelined(T.ceildiv(shard, 16), num_stages=2):
                    T.copy(A_dev[by * 32, i * 16], a)
                    T.copy(B_dev[i * 16, bx * 16], b)
                    T.gemm(a, b, c)
                T.copy(c, C_dev[by * 32, bx * 16])
            with T.Scale("device"):
                T.allreduce(C_dev)

    a, b = values(1, m, k, dtype="bfloat16"), values(2, k, n, dtype="bfloat16")
    args = [
        [a[:, r * shard : (r + 1) * shard].clone(), b[r * shard : (r + 1) * shard].clone(), blank(m, n)]
        for r in range(world)
    ]
    tilescale.emulate(program, args)
    for _, _, c in args:
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_all_devices_of_the_launch(world):
    """T.ALL: one traced program for every number of devices, sizes bound when it is launched."""
    rows = T.dynamic("rows")

    @T.prim_func
    def program(X: T.Tensor((rows, 4), "float32"), Y: T.Tensor((rows, 4), "float32"), R: T.Tensor((2,), "int32")):
        with T.Kernel(device=T.ALL, block=T.ceildiv(rows, 3), threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((3, 4), "float32")
                T.copy(X[b * 3, 0], tile)
                with T.Scale("device") as (rank, size):
                    T.allreduce(tile)
                    if b == 0:
                        R[0] = rank
                        R[1] = size
                T.copy(tile, Y[b * 3, 0])

    n = 2 * world + 1
    sources = [values(r, n, 4) for r in range(world)]
    args = [[x.clone(), blank(n, 4), blank(2, dtype="int32")] for x in sources]
    tilescale.emulate(program, args)
    for r, (_, y, ranks) in enumerate(args):
        assert_rounded(y, OPS["sum"]([wide(x) for x in sources]))
        assert ranks.tolist() == [r, world]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_views_of_dynamic_shapes(world):
    """The global extent is known only from the shards: rows = rows of a shard x devices."""
    rows = T.dynamic("rows")

    @T.prim_func
    def program(X: T.Tensor((rows, 8), "float32"), Y: T.Tensor((rows, 8), "float32")):
        with T.Kernel(device=world, block=T.ceildiv(rows // world, 4), threads=32) as b:
            with T.Scale("device"):
                mine = T.view(X, layout=T.FullRow)
                whole = T.view(Y, layout=T.Replica)
                T.all_gather(mine, whole)
            with T.Scale("block"):
                for i, j in T.Parallel(4, 8):
                    if b * 4 + i < rows // world:
                        mine[b * 4 + i, j] = 0

    x = values(1, 5 * world, 8)
    args = [[shard.clone(), blank(5 * world, 8)] for shard in x.chunk(world)]
    tilescale.emulate(program, args)
    for shard, y in args:
        assert_same(y, x)
        assert_same(shard, torch.zeros(5, 8))


def test_a_grid_larger_than_the_device_holds_runs_in_waves():
    """2000 programs of 1024 threads, 264 at once; each adds its number once."""

    @T.prim_func
    def program(X: T.Tensor((2000,), "int32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(2000, threads=1024) as b:
            X[b] = b
            with T.Scale("thread") as (lane, _):
                if lane == 0:
                    T.atomic_add(S[0], b)

    args = [blank(2000, dtype="int32"), torch.zeros(1, dtype=torch.int32)]
    report = tilescale.emulate(program, args)
    assert args[0].tolist() == list(range(2000))
    assert args[1].item() == sum(range(2000))
    assert report.activity[0].programs == 2000


def test_a_barrier_of_the_whole_grid():
    @T.prim_func
    def program(X: T.Tensor((40,), "int32"), Y: T.Tensor((40,), "int32")):
        with T.Kernel(40, threads=32) as b:
            with T.Scale("block") as (rank, size):
                X[b] = b * b
                T.barrier()
                Y[b] = X[(rank + 7) % size]

    args = [blank(40, dtype="int32"), blank(40, dtype="int32")]
    tilescale.emulate(program, args)
    assert args[1].tolist() == [((b + 7) % 40) ** 2 for b in range(40)]


def test_repeated_launches_on_the_same_tensors():
    """Counters go on from launch to launch: each waits for more than the one before left."""

    @T.prim_func
    def program(X: T.Tensor((4,), "int32"), F: T.Tensor((1,), "int32"), launch: T.int32):
        with T.Kernel(device=3, threads=32):
            with T.Scale("device") as (rank, size):
                T.signal(F[0], dst=(rank + 1) % size)
                T.wait(F[0], ">=", launch)
                T.allreduce(X)

    sources = [values(r, 4, dtype="int32") for r in range(3)]
    args = [[x.clone(), torch.zeros(1, dtype=torch.int32), 0] for x in sources]
    expected = sum(wide(x) for x in sources)
    for launch in range(1, 5):
        for a in args:
            a[2] = launch
        tilescale.emulate(program, args)
        for x, f, _ in args:
            assert_same(x, expected)
            assert f.item() == launch
        expected = expected * 3


def test_tensors_that_are_not_contiguous():
    @T.prim_func
    def program(X: T.Tensor((6, 8), "float32"), Y: T.Tensor((6, 8), "float32")):
        with T.Kernel(device=2, block=3, threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((2, 8), "float32")
                T.copy(X[b * 2, 0], tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y[b * 2, 0], dst=1 - rank)

    backing = [blank(8, 12) for _ in range(2)]
    args = [[values(r, 8, 6).T, backing[r][1:7, ::2][:, :6]] for r in range(2)]
    args = [[x, torch.as_strided(back, (6, 8), (12, 1), 13)] for (x, _), back in zip(args, backing, strict=True)]
    tilescale.emulate(program, args)
    for r in range(2):
        assert_same(args[r][1], args[1 - r][0])
        assert backing[r].isnan().sum() == 8 * 12 - 6 * 8
