# SPDX-License-Identifier: MIT
"""Cluster GEMM: blocks on neighbouring SMs multiply as one larger block.

    C = A B       A, C: rows over the devices       B: the whole on each

    cta_cluster   a (256, 64)  x  b (64, 128)   ->  c (256, 128)          tiles of the cluster, two blocks hold them
    block 0       a, rows 0 to 127       half of b  ->  c, rows 0 to 127
    block 1       a, rows 128 to 255     half of b  ->  c, rows 128 to 255

The idea: a level above the block that still has tiles. What `T.alloc` makes inside `T.Scale("cta_cluster")` lies in the
shared memories of all its blocks together, and `T.gemm` there is one GEMM of the whole tiles. Inside `T.Scale("block")`
each block loads its share, `T.view(tile, layout=T.FullRow)`: b is shared as well, although both need all of it. So each
element of B is read from device memory once for 256 rows of C in place of 128, and comes to the other block over the
network between SMs; on a GPU, as a multicast of the bulk copy engine. Copies of whole tiles need no view: each block
copies its share. `out` stages c in shared memory, so that whole rows are stored.

The blocks of a cluster start together, on SMs that reach each other's shared memory. The launch says how many they are,
`T.Kernel(cta_cluster=2, block=...)`, the grid still counts blocks, and its first extent is a multiple of them.

Things to try: clusters of 4 with tiles of (512, 128); split c by columns instead (share b, then which part of a does
each block load?); add a bias of the rows to c at cluster level; a tile too large for two blocks.
"""

import common
import torch

import tilescale.language as T


def cluster_gemm(
    devices: int,
    M: int,
    N: int,
    K: int,
    blocks: int = 2,
    tile: tuple[int, int, int] = (256, 128, 64),
    stages: int = 3,
    threads: int = 256,
    dtype: str = "float32",
):
    """Each cluster computes a tile of C.

    Args:
        blocks: in a cluster.
        tile: rows and columns of a cluster's tile of C, and the depth of one step. (256, 256, 64) with 4 stages makes
            the most of an H200.
        dtype: the type of C.
    """
    TILE_M, TILE_N, TILE_K = tile
    grid = (-(-M // devices // TILE_M) * blocks, -(-N // TILE_N))
    rows, share = TILE_M // blocks, TILE_K // blocks

    @T.prim_func
    def by_clusters(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), dtype)):
        with T.Kernel(device=devices, cta_cluster=blocks, block=grid, threads=threads) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                C_dev = T.view(C, layout=T.FullRow)
            with T.Scale("cta_cluster"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                out = T.alloc((TILE_M, TILE_N), dtype, level="l1")
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K, TILE_K), num_stages=stages):
                    with T.Scale("block") as (rank, _):  # each block loads its share
                        T.copy(A_dev[bx * rows, k * TILE_K], T.view(a, layout=T.FullRow))
                        T.copy(B[k * TILE_K + rank * share, by * TILE_N], T.view(b, layout=T.FullRow))
                    T.gemm(a, b, c)
                T.copy(c, out)
                T.copy(out, C_dev[bx * rows, by * TILE_N])

    return by_clusters


@common.options(size=512)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, A and C split by rows."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    results = [torch.full((size // devices, size), torch.nan) for _ in range(devices)]
    args = list(zip(a.chunk(devices), [b] * devices, results, strict=True))
    common.run(cluster_gemm(devices, size, size, size), args)
    bound = common.rounding(size, a.double().abs() @ b.double().abs()).chunk(devices)
    common.compare("clusters", results, (a.double() @ b.double()).chunk(devices), bound)


if __name__ == "__main__":
    main()
