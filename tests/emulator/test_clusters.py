# SPDX-License-Identifier: MIT
"""Clusters: programs that reach each other's shared memory, and statements that a cluster executes as one unit."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import DTYPES, OPS, assert_rounded, assert_same, blank, values, wide
from tilescale.errors import LaunchError, UnsupportedError


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_tiles_go_round_their_cluster(dtype):
    """12 programs in clusters of 4: put to the next program, get from the previous one."""

    @T.prim_func
    def program(X: T.Tensor((12, 8), dtype), P: T.Tensor((12, 8), dtype), G: T.Tensor((12, 8), dtype)):
        with T.Kernel(cta_cluster=4, block=12, threads=32) as b:
            with T.Scale("block") as (rank, size):
                mine = T.alloc((8,), dtype)
                put = T.alloc((8,), dtype)
                got = T.alloc((8,), dtype)
                T.copy(X[b, 0], mine)
                T.barrier()
                T.copy(mine, put, dst=(rank + 1) % size)
                T.copy(mine, got, src=(rank + size - 1) % size)
                T.barrier()
                T.copy(put, P[b, 0])
                T.copy(got, G[b, 0])

    x = values(1, 12, 8, dtype=dtype)
    args = [x, blank(12, 8, dtype=dtype), blank(12, 8, dtype=dtype)]
    tilescale.emulate(program, args)
    before = [b // 4 * 4 + (b - 1) % 4 for b in range(12)]
    assert_same(args[1], wide(x)[before])
    assert_same(args[2], wide(x)[before])


def test_ranks_and_collectives_in_a_two_dimensional_cluster():
    @T.prim_func
    def program(X: T.Tensor((4, 4), "int32"), R: T.Tensor((4, 4), "int32"), S: T.Tensor((4, 4), "int32")):
        with T.Kernel(cta_cluster=(2, 2), block=(4, 4), threads=32) as (bx, by):
            with T.Scale("block") as (rank, size):
                mine = T.alloc((1,), "int32")
                mine[0] = X[by, bx]
                T.allreduce(mine)
                R[by, bx] = rank * 10 + size
                S[by, bx] = mine[0]

    x = values(1, 4, 4, dtype="int32")
    args = [x, blank(4, 4, dtype="int32"), blank(4, 4, dtype="int32")]
    tilescale.emulate(program, args)
    quarters = wide(x).reshape(2, 2, 2, 2).sum((1, 3))
    assert_same(args[2], quarters.repeat_interleave(2, 0).repeat_interleave(2, 1))
    expected = torch.tensor([[4, 14], [24, 34]]).repeat(2, 2)
    assert_same(args[1], expected)


def test_the_cluster_as_one_unit_multiplies_for_its_programs():
    """The cluster owns a tile of 64 rows; its two programs load and store halves of it, it multiplies as a whole."""
    m, n, k, steps = 64, 16, 32, 2

    @T.prim_func
    def program(
        A: T.Tensor((2 * m, k * steps), "float16"),
        B: T.Tensor((k * steps, n), "float16"),
        C: T.Tensor((2 * m, n), "float32"),
    ):
        with T.Kernel(cta_cluster=2, block=4, threads=128) as b:
            with T.Scale("cta_cluster") as (cluster, _):
                a = T.alloc((m, k), "float16", level="l1")
                w = T.alloc((k, n), "float16", level="l1")
                c = T.alloc((m, n), "float32", level="l0")
                T.clear(c)
                for step in T.serial(steps):
                    with T.Scale("block") as (rank, size):
                        T.copy(A[cluster * m + rank * (m // size), step * k], T.view(a, layout=T.FullRow))
                        T.copy(B[step * k + rank * (k // size), 0], T.view(w, layout=T.FullRow))
                    T.gemm(a, w, c)
                with T.Scale("block") as (rank, size):
                    T.copy(T.view(c, layout=T.FullRow), C[b * (m // size), 0])

    a, w = values(1, 2 * m, k * steps, dtype="float16"), values(2, k * steps, n, dtype="float16")
    args = [a, w, blank(2 * m, n)]
    tilescale.emulate(program, args)
    torch.testing.assert_close(args[2].double(), a.double() @ w.double(), rtol=1e-4, atol=1e-4)


def test_programs_keep_their_own_variables_through_a_region_of_the_cluster():
    """A value that each program computed before the region is its own again inside T.Scale("block")."""

    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8, 4), "int32")):
        with T.Kernel(cta_cluster=4, block=8, threads=32) as b:
            own = X[b] * 3
            kept = T.alloc_var("int32")
            kept = b + 100
            with T.Scale("cta_cluster") as (cluster, _):
                tile = T.alloc((4,), "int32")
                for step in T.serial(2):
                    with T.Scale("block") as (rank, _):
                        tile[rank] = own + step
                with T.Scale("block") as (rank, _):
                    Y[b, 0] = tile[rank]
                    Y[b, 1] = tile[3 - rank]
                    Y[b, 2] = cluster
                    Y[b, 3] = kept

    x = values(1, 8, dtype="int32")
    args = [x, blank(8, 4, dtype="int32")]
    tilescale.emulate(program, args)
    own = [v * 3 + 1 for v in x.tolist()]
    mirror = [b // 4 * 4 + 3 - b % 4 for b in range(8)]
    assert args[1].tolist() == [[own[b], own[mirror[b]], b // 4, b + 100] for b in range(8)]


def test_clusters_of_all_devices_exchange_with_their_namesakes():
    @T.prim_func
    def program(X: T.Tensor((6, 4), "float32"), Y: T.Tensor((6, 4), "float32")):
        with T.Kernel(device=3, cta_cluster=2, block=6, threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((4,), "float32")
                T.copy(X[b, 0], tile)
                T.allreduce(tile)
                with T.Scale("device"):
                    T.allreduce(tile, op="max")
                T.copy(tile, Y[b, 0])

    sources = [values(r, 6, 4) for r in range(3)]
    args = [[x.clone(), blank(6, 4)] for x in sources]
    tilescale.emulate(program, args)
    expected = OPS["max"]([wide(x).reshape(3, 2, 4).sum(1).repeat_interleave(2, 0) for x in sources])
    for _, y in args:
        assert_rounded(y, expected)


def test_more_clusters_than_fit_at_once():
    @T.prim_func
    def program(X: T.Tensor((640,), "int32")):
        with T.Kernel(cta_cluster=2, block=640, threads=1024) as b:
            with T.Scale("block") as (rank, _):
                mine = T.alloc((1,), "int32")
                theirs = T.alloc((1,), "int32")
                mine[0] = X[b]
                T.copy(mine, theirs, dst=1 - rank)
                T.barrier()
                X[b] = theirs[0]

    x = torch.arange(640, dtype=torch.int32)
    tilescale.emulate(program, [x])
    assert x.tolist() == [b ^ 1 for b in range(640)]


@pytest.mark.parametrize(("blocks", "cluster"), [(5, (2, 1, 1)), (4, (1, 2, 1))])
def test_a_grid_that_does_not_divide_into_clusters(blocks, cluster):
    @T.prim_func
    def program(X: T.Tensor((4,), "int32")):
        with T.Kernel(blocks, threads=32, cluster_dims=cluster) as b:
            X[b] = 1

    with pytest.raises(LaunchError, match=f"{blocks}.*does not divide into clusters of.*2"):
        tilescale.emulate(program, [blank(4, dtype="int32")])


@pytest.mark.parametrize(
    ("mask", "tiles"), [(0b0011, [0, 0, 2, 3]), (0b1010, [0, 1, 2, 1]), (0b1111, [0] * 4), (0b0100, [0, 1, 2, 3])]
)
def test_the_first_of_a_mask_loads_for_all_of_it(mask, tiles):
    """Other blocks use a tile too, which is not loaded; a name through a variable is the first block's too."""

    @T.prim_func
    def program(A: T.Tensor((2, 8 * 64), "float32"), B: T.Tensor((2, 8 * 64), "float32")):
        with T.Kernel(8, threads=128, cluster_dims=(4, 1, 1)) as bx:
            tile = T.alloc_shared((1, 64), "float32")
            column = bx * 64
            for row in T.serial(2):
                T.copy_cluster(A[row, column], tile, cluster_mask=mask)
                T.cluster_sync()
                T.copy(tile, B[row, bx * 64])
                T.cluster_sync()

    a = values(1, 2, 8 * 64)
    args = [a.clone(), blank(2, 8 * 64)]
    tilescale.emulate(program, args)
    order = tiles + [4 + tile for tile in tiles]
    assert torch.equal(args[1], a.view(2, 8, 64)[:, order].reshape(2, -1))


def test_a_multicast_from_a_place_that_memory_says_is_refused():
    @T.prim_func
    def program(A: T.Tensor((4 * 64,), "float32"), at: T.Tensor((4,), "int32"), B: T.Tensor((4 * 64,), "float32")):
        with T.Kernel(4, threads=128, cluster_dims=(4, 1, 1)) as bx:
            tile = T.alloc_shared((64,), "float32")
            T.copy_cluster(A[at[bx] * 64], tile, cluster_mask=3)
            T.copy(tile, B[bx * 64])

    with pytest.raises(UnsupportedError, match="multicast load of 'A' from a position that depends on memory"):
        tilescale.emulate(program, [blank(256), torch.zeros(4, dtype=torch.int32), blank(256)])
