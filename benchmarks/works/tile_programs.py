# SPDX-License-Identifier: MIT
"""Programs that combine tiles of all devices, in the language."""

from typing import Any

from programs import THREADS, Tiling, multiply, raster

import tilescale.language as T


def product_allreduce(devices: int, M: int, N: int, K: int, t: Tiling, blocks: int = 0) -> Any:
    """Sum each tile over the devices in the block that has multiplied it.

    `blocks`: of a persistent grid, 0 for one block for each tile.
    """
    tiles_m, tiles_n = M // t.m, N // t.n
    tiles = tiles_m * tiles_n
    blocks = min(blocks or tiles, tiles)

    @T.prim_func
    def gemm_then_sum(
        A: T.Tensor((1, M, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((M, N), "bfloat16")
    ):
        with T.Kernel(device=devices, block=blocks, threads=THREADS) as block:
            with T.Scale("block"):
                a = T.alloc((t.m, t.k), "bfloat16", level="l1")
                b = T.alloc((t.n, t.k), "bfloat16", level="l1")
                c = T.alloc((t.m, t.n), "float32", level="l0")
                out = T.alloc((t.m, t.n), "bfloat16", level="l1")
                with T.Scale("device"):
                    for iteration in T.serial(T.ceildiv(tiles - block, blocks) if blocks < tiles else 1):
                        row, column = raster(block + iteration * blocks, tiles_m, tiles_n)
                        multiply(A, 0, row * t.m, B, column * t.n, a, b, c, K // t.k, t.k, t.stages)
                        T.copy(c, out)
                        T.allreduce(out)
                        T.copy(out, C[row * t.m, column * t.n])

    return gemm_then_sum
