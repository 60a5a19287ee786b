# SPDX-License-Identifier: MIT
"""All-gather + GEMM: a layer whose input is split by rows and whose weights are split by columns.

    C = A B     A: rows over the devices     B, C: columns over the devices

    device r:   all of A (gathered)  x  B[:, r]  ->  C[:, r]

The version in phases is simple: gather A, then multiply. But then all devices wait for the whole of A before the first
tile is computed, although each tile of C needs rows of one shard only.

Tile by tile the two overlap. Every block first sends its part of the local shard to all devices and counts it in the
receiver's flag of that shard; then it computes tiles of C, those of its own shard first, and waits for a shard just
before it needs it:

    device 1:   send A1 to all | C[1] = A1 B | wait A2 | C[2] = A2 B | wait A3 | C[3] = A3 B | wait A0 | C[0] = A0 B

The idea: a flag for each shard, and tiles in the order in which the shards arrive. The grid is persistent: two blocks
on each SM, all of them resident at once, iterate over the tiles. With one block for each tile the first blocks could
fill the device and wait for shards that later blocks of a peer have yet to send: a deadlock.

When it wins: simulated on four H200, M = N = K of 1024 takes 13.9 us in phases and 16.5 us tile by tile, 2048 takes
35.5 and 35.0 us, 4096 takes 182 and 177 us. Sends share the SMs with the GEMM here; `22_ag_gemm_overlapped.py` leaves
them to the copy engine and takes 152 us for 4096.

Things to try: the order `step` in place of `rank + step`: same result, but most devices begin by waiting; one flag for
each row of tiles in place of each shard; what the emulator says of 100000 blocks that all wait; other sizes, without
data: `tilescale.emulate(tile_by_tile(4, 4096, 4096, 4096), data=False).time_us`.
"""

import common
import forms
import torch

import tilescale.language as T

TILE_M, TILE_N, TILE_K = 64, 64, 32


def phases(devices: int, M: int, N: int, K: int):
    """In phases: gather, then multiply."""

    @T.prim_func
    def ag_then_gemm(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")):
        grid = (T.ceildiv(N // devices, TILE_N), T.ceildiv(M, TILE_M))
        with T.Kernel(device=devices, block=grid, threads=128) as (bx, by):
            gathered = T.alloc((M, K), "bfloat16", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                B_dev = T.view(B, layout=T.FullCol)
                C_dev = T.view(C, layout=T.FullCol)
                T.all_gather(A_dev, gathered, dim=0)
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K, TILE_K), num_stages=2):
                    T.copy(gathered[by * TILE_M, k * TILE_K], a)
                    T.copy(B_dev[k * TILE_K, bx * TILE_N], b)
                    T.gemm(a, b, c)
                T.copy(c, C_dev[by * TILE_M, bx * TILE_N])

    return ag_then_gemm


def tile_by_tile(devices: int, M: int, N: int, K: int, blocks: int | None = None):
    """Overlap tile by tile: a block waits for the flag of the shard that its tile needs."""
    rows = M // devices
    tiles_m, tiles_n, tiles_k = -(-rows // TILE_M), -(-N // devices // TILE_N), -(-K // TILE_K)
    blocks = blocks or common.grid_of(devices * tiles_m * tiles_n)

    @T.prim_func
    def ag_gemm(
        A: T.Tensor((devices, rows, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((devices, rows, N), "float32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=128) as block:
            gathered = T.alloc((devices, rows, K), "bfloat16", level="l2")
            arrived = T.alloc((devices,), "int32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                B_dev = T.view(B, layout=T.FullCol)
                C_dev = T.view(C, layout=T.FullCol)
                T.clear(arrived)
                T.barrier()  # no device reads the workspace of the previous launch, every flag is cleared
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    for iteration in T.serial(T.ceildiv(tiles_m * tiles_k - block, blocks)):
                        part = block + iteration * blocks  # of the local shard
                        row = part // tiles_k * TILE_M
                        col = part % tiles_k * TILE_K
                        T.copy(A_dev[0, row, col], a)
                        for step in T.serial(size):
                            T.copy(a, gathered[rank, row, col], dst=(rank + step) % size, signal=arrived[rank])
                    for iteration in T.serial(T.ceildiv(devices * tiles_m * tiles_n - block, blocks)):
                        tile = block + iteration * blocks  # of C, rows of the local shard first
                        shard = (rank + tile // (tiles_m * tiles_n)) % size
                        m = tile // tiles_n % tiles_m * TILE_M
                        n = tile % tiles_n * TILE_N
                        T.wait(arrived[shard], ">=", tiles_m * tiles_k)
                        T.clear(c)
                        for k in T.Pipelined(tiles_k, num_stages=2):
                            T.copy(gathered[shard, m, k * TILE_K], a)
                            T.copy(B_dev[k * TILE_K, n], b)
                            T.gemm(a, b, c)
                        T.copy(c, C_dev[shard, m, n])

    return ag_gemm


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, A split by rows and B by columns."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    for program, rows in (phases, (size,)), (tile_by_tile, (devices, size // devices)):
        a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
        a_shards = a.reshape(*rows, size).chunk(devices)
        b_shards = [part.contiguous() for part in b.chunk(devices, 1)]
        c_shards = [torch.full((*rows, size // devices), torch.nan) for _ in range(devices)]
        args = list(zip(a_shards, b_shards, c_shards, strict=True))
        common.run(program(devices, size, size, size), args)
        want = (a.double() @ b.double()).reshape(*rows, size).chunk(devices, -1)
        bound = common.rounding(size, a.double().abs() @ b.double().abs()).reshape(*rows, size).chunk(devices, -1)
        common.compare(program.__name__, c_shards, want, bound)
    forms.times((phases, tile_by_tile), devices, *3 * [common.divided(4096, devices)])


if __name__ == "__main__":
    main()
