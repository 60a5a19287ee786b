# SPDX-License-Identifier: MIT
"""GEMM + all-reduce: a tensor-parallel layer whose result every device needs whole.

    C = A B     A: columns over the devices     B: rows over the devices     C: the same on every device

    device r:   A[:, r] B[r, :]  =  a part of every element of C

Phase by phase: multiply, then `T.allreduce` the whole of C. All links rest while the devices multiply, and all tensor
cores while the devices communicate.

Tile by tile each tile has an owner that adds up its n parts and sends the sum to all (04's two_shot), and a block
multiplies the next tile while one is in flight:

    block of device r:   multiply t0, send | multiply t1, send | reduce t0 | multiply t2, send | reduce t1 | ...
                                               ^ the parts of t0 cross the network meanwhile

The idea: reduce one iteration later. A block multiplies and sends the tile of this iteration before it waits for the
tile of the previous one, whose parts have had the time of a whole GEMM to arrive. Ownership rotates with the iteration,
so that every block of every device reduces equally often.

Why it cannot deadlock, however many blocks run at once: a block waits only for blocks of its own number, which send the
tile that it waits for before they wait for anything later. The sums are added in the order of the ranks, so all devices
get the same bits.

When it wins: simulated on four H200, M = N = 2048 and K = 8192 takes 132 us in phases and 104 us tile by tile, K = 2048
takes 92 and 84 us; M = N = K = 1024 takes 26.4 and 30.5 us, as a block has one tile and no work to hide its sum.

Things to try: reduce in the same iteration and see which waits become long; give one device all the tiles and compare
the bytes; the time of a real layer, `tilescale.emulate(tile_by_tile(4, 2048, 2048, 8192), data=False).time_us`, with
more and fewer blocks for each SM.
"""

import common
import forms
import torch

import tilescale.language as T

TILE_M, TILE_N, TILE_K = 64, 64, 32


def phases(devices: int, M: int, N: int, K: int):
    """In phases: multiply, then all-reduce."""

    @T.prim_func
    def gemm_then_ar(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(N, TILE_N), T.ceildiv(M, TILE_M)), threads=128) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K // devices, TILE_K), num_stages=2):
                    T.copy(A_dev[by * TILE_M, k * TILE_K], a)
                    T.copy(B_dev[k * TILE_K, bx * TILE_N], b)
                    T.gemm(a, b, c)
                T.copy(c, C[by * TILE_M, bx * TILE_N])
            with T.Scale("device"):
                T.allreduce(C)

    return gemm_then_ar


def tile_by_tile(devices: int, M: int, N: int, K: int, blocks: int | None = None):
    """Overlap tile by tile: reduce the previous iteration's tile while the parts of this one are in flight."""
    tiles_m, tiles_n = -(-M // TILE_M), -(-N // TILE_N)
    blocks = blocks or common.grid_of(tiles_m * tiles_n)

    @T.prim_func
    def gemm_ar(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(device=devices, block=blocks, threads=128) as block:
            inbox = T.alloc((devices, M, N), "float32", level="l2")
            arrived = T.alloc((tiles_m * tiles_n,), "int32", level="l2")  # parts of a tile, at its owner
            reduced = T.alloc((tiles_m * tiles_n,), "int32", level="l2")  # 1 when the tile of C is here
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                T.clear(arrived)
                T.clear(reduced)
                T.barrier()  # every inbox and every C is free, every flag is cleared
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                one = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                tile = T.alloc((TILE_M, TILE_N), "float32", level="l1")
                iterations = T.ceildiv(tiles_m * tiles_n - block, blocks)
                with T.Scale("device") as (rank, size):
                    for iteration in T.serial(iterations + 1):
                        if iteration < iterations:
                            t = block + iteration * blocks
                            m = t // tiles_n * TILE_M
                            n = t % tiles_n * TILE_N
                            T.clear(c)
                            for k in T.Pipelined(T.ceildiv(K // devices, TILE_K), num_stages=2):
                                T.copy(A_dev[m, k * TILE_K], a)
                                T.copy(B_dev[k * TILE_K, n], b)
                                T.gemm(a, b, c)
                            T.copy(c, tile)
                            T.copy(tile, inbox[rank, m, n], dst=(block + iteration) % size, signal=arrived[t])
                        if iteration > 0 and (block + iteration - 1) % size == rank:
                            t = block + (iteration - 1) * blocks
                            m = t // tiles_n * TILE_M
                            n = t % tiles_n * TILE_N
                            T.wait(arrived[t], ">=", size)
                            T.clear(c)
                            for r in T.serial(size):
                                T.copy(inbox[r, m, n], one)
                                for i, j in T.Parallel(TILE_M, TILE_N):
                                    c[i, j] += one[i, j]
                            T.copy(c, tile)
                            for step in T.serial(size):
                                T.copy(tile, C[m, n], dst=(rank + step) % size, signal=reduced[t])
                    for iteration in T.serial(iterations):
                        T.wait(reduced[block + iteration * blocks], ">=", 1)

    return gemm_ar


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, the inner dimension split over the devices; every device ends with all of C."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    for program in phases, tile_by_tile:
        a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
        a_shards = [part.contiguous() for part in a.chunk(devices, 1)]
        results = [torch.full((size, size), torch.nan) for _ in range(devices)]
        common.run(program(devices, size, size, size), list(zip(a_shards, b.chunk(devices), results, strict=True)))
        bound = common.rounding(size, a.double().abs() @ b.double().abs())
        common.compare(program.__name__, results, [a.double() @ b.double()] * devices, [bound] * devices)
    forms.times((phases, tile_by_tile), devices, 2048, 2048, common.divided(8192, devices))


if __name__ == "__main__":
    main()
