# SPDX-License-Identifier: MIT
"""Products whose tiles travel one by one: the sum of a @ b over the ranks, on the owners of its rows or on every rank.

As many blocks as run at once take tiles in turns. A finished tile of another rank's rows goes straight to its owner
while its block multiplies the next one; own rows come last, with what has arrived. For results of a few waves: no copy
queue has to start, and what is late at the end is one wave of tiles. Sums are made in float32 and in one order.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.products import Product, add, add_bias, multiply, rescale


def program(size: int, rows: int, of: Product, blocks: int, everywhere: bool) -> Any:
    """`rows` of each rank, whole tiles; `everywhere`: every rank gets all rows, else its own."""
    N, K, dtype, tiles = of.N, of.K, of.dtype, of.tiles
    tiles_m, tiles_n = rows // tiles.m, -(-N // tiles.n)
    a_shard = tiles_m * tiles_n
    kind, scales = ("float32", ((size, rows), (N,))) if of.scaled else (dtype, ((1, 1), (1,)))

    @T.prim_func
    def matmul_by_tiles(
        A: T.Tensor((size, rows, K), dtype),
        B: T.Tensor(of.b_shape, dtype),
        bias: T.Tensor((N if of.biased else 1,), of.result),
        of_A: T.Tensor(scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        inbox: T.Tensor((size, rows, N), of.result),  # by source
        G: T.Tensor((size, rows, N) if everywhere else (1, 1, 1), of.result),  # sums of the others
        C: T.Tensor((size if everywhere else 1, rows, N), of.result),
    ):
        with T.Kernel(device=size, block=blocks, threads=tiles.threads) as block:
            arrived = T.alloc_flags((size, tiles_m, tiles_n))
            gathered = T.alloc_flags((size, tiles_m, tiles_n))
            with T.Scale("block"):
                a = T.alloc((tiles.m, of.depth), dtype, level="l1")
                b = T.alloc(of.b_tile, dtype, level="l1")
                c = T.alloc((tiles.m, tiles.n), "float32", level="l0")
                out = T.alloc((tiles.m, tiles.n), of.result, level="l1")
                with T.Scale("device") as (rank, _):
                    for turn in T.serial(T.ceildiv(size * a_shard - block, blocks)):
                        tile = block + turn * blocks
                        owner = (rank + 1 + tile // a_shard) % size  # the own rows last
                        place = tile % a_shard
                        m, n = tiles.place(place % (tiles.group * tiles_n), place // (tiles.group * tiles_n))
                        T.clear(c)
                        multiply(A, owner, m, B, n, a, b, c, K, tiles.stages, of.transposed)
                        if of.scaled:
                            rescale(c, of_A, owner, m, of_B, 0, n, rows, N)
                        if owner != rank:
                            T.copy(c, out)
                            T.copy(
                                out, inbox[rank, m, n], dst=owner, signal=arrived[rank, m // tiles.m, n // tiles.n]
                            )
                        else:
                            for step in T.serial(1, size):
                                source = (rank + size - step) % size  # the rank before was the first to send here
                                T.wait(arrived[source, m // tiles.m, n // tiles.n], ">=", 1)
                                T.copy(inbox[source, m, n], out)
                                add(c, out)
                            if of.biased:
                                add_bias(c, bias, n, N)
                            T.copy(c, out)
                            T.copy(out, C[rank if everywhere else 0, m, n])
                            if everywhere:
                                for step in T.serial(1, size):
                                    T.copy(
                                        out,
                                        G[rank, m, n],
                                        dst=(rank + step) % size,
                                        signal=gathered[rank, m // tiles.m, n // tiles.n],
                                    )
            with T.Scale("device"):  # the grid of the product has ended: its blocks hold nobody up
                pass
            if everywhere:
                with T.Scale("block"):
                    part = T.alloc((tiles.m, tiles.n), of.result, level="l1")
                    with T.Scale("device") as (rank, _):
                        for turn in T.serial(T.ceildiv((size - 1) * a_shard - block, blocks)):
                            tile = block + turn * blocks
                            shard = (rank + size - 1 - tile // a_shard) % size
                            place = tile % a_shard
                            m, n = tiles.place(place % (tiles.group * tiles_n), place // (tiles.group * tiles_n))
                            T.wait(gathered[shard, m // tiles.m, n // tiles.n], ">=", 1)
                            T.copy(G[shard, m, n], part)
                            T.copy(part, C[shard, m, n])

    return matmul_by_tiles
