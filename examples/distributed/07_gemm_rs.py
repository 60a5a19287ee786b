# SPDX-License-Identifier: MIT
"""GEMM + reduce-scatter: the second half of a tensor-parallel layer, the inner dimension split over the devices.

    C = A B     A: columns over the devices     B: rows over the devices     C: rows over the devices

    device r:   A[:, r] B[r, :]  =  a part of every element of C;  the parts of row block o add up on device o

Phase by phase: multiply into a workspace, then `T.reduce_scatter` it.

Tile by tile a finished tile goes straight to the device that owns its rows, where it raises that tile's flag. The owner
adds up the parts of a tile when all n have arrived, while others are still multiplying:

    block of device r:   multiply a tile of owner r + 1, put it there | ... of owner r + 2 | ... | its own
    then:                wait for the n parts of an owned tile | add them up in float32 | write C

The idea: order. Every device starts with the tiles of another owner, so that no owner is sent everything at once. The
sums come in a second grid phase (`T.Scale("device")` around `T.Scale("block")` opens one): a phase that only sends
always ends, and only then do blocks wait, so the order of the tiles is free and nothing can deadlock.

When it wins: for large matrices, and then barely. Simulated on four H200, M = N = K of 1024 takes 15.4 us in phases and
18.6 us tile by tile, 2048 takes 55.5 and 59.6 us, 4096 takes 262 and 256 us. In the form of `23_gemm_rs_overlapped.py`,
where the copy engine sends chunks of rows while the GEMM runs, 4096 takes 193 us with `chunk=512`.

Things to try: start with the tiles that stay on this device and compare the waiting times; send bfloat16 and see what
the sums lose; add a bias where the parts are added up.
"""

import common
import forms
import torch

import tilescale.language as T

TILE_M, TILE_N, TILE_K = 64, 64, 32


def phases(devices: int, M: int, N: int, K: int):
    """In phases: multiply, then reduce and scatter."""

    @T.prim_func
    def gemm_then_rs(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(N, TILE_N), T.ceildiv(M, TILE_M)), threads=128) as (bx, by):
            partial = T.alloc((M, N), "float32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                C_dev = T.view(C, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K // devices, TILE_K), num_stages=2):
                    T.copy(A_dev[by * TILE_M, k * TILE_K], a)
                    T.copy(B_dev[k * TILE_K, bx * TILE_N], b)
                    T.gemm(a, b, c)
                T.copy(c, partial[by * TILE_M, bx * TILE_N])
            with T.Scale("device"):
                T.reduce_scatter(partial, C_dev, op="sum", dim=0)

    return gemm_then_rs


def tile_by_tile(devices: int, M: int, N: int, K: int):
    """Overlap tile by tile: send a finished tile to its owner."""
    rows = M // devices
    tiles_m, tiles_n = -(-rows // TILE_M), -(-N // TILE_N)

    @T.prim_func
    def gemm_rs(
        A: T.Tensor((devices, rows, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((rows, N), "float32")
    ):
        with T.Kernel(device=devices, block=(tiles_n, tiles_m, devices), threads=128) as (bx, by, bz):
            inbox = T.alloc((devices, rows, N), "float32", level="l2")
            arrived = T.alloc((tiles_m, tiles_n), "int32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                T.clear(arrived)
                T.barrier()  # no device reads the inbox of the previous launch, every flag is cleared
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                part = T.alloc((TILE_M, TILE_N), "float32", level="l1")
                with T.Scale("device") as (rank, size):
                    owner = (rank + bz + 1) % size
                    T.clear(c)
                    for k in T.Pipelined(T.ceildiv(K // devices, TILE_K), num_stages=2):
                        T.copy(A_dev[owner, by * TILE_M, k * TILE_K], a)
                        T.copy(B_dev[k * TILE_K, bx * TILE_N], b)
                        T.gemm(a, b, c)
                    T.copy(c, part)
                    T.copy(part, inbox[rank, by * TILE_M, bx * TILE_N], dst=owner, signal=arrived[by, bx])
            with T.Scale("device"):
                with T.Scale("block"):
                    total = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                    one = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                    if bz == 0:  # one block for each owned tile
                        T.wait(arrived[by, bx], ">=", devices)
                        T.clear(total)
                        for r in T.serial(devices):
                            T.copy(inbox[r, by * TILE_M, bx * TILE_N], one)
                            for i, j in T.Parallel(TILE_M, TILE_N):
                                total[i, j] += one[i, j]
                        T.copy(total, C[by * TILE_M, bx * TILE_N])

    return gemm_rs


@common.options(size=256)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, the inner dimension split over the devices; the owner of a row block has its
    result.
    """
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    for program, rows in (phases, (size,)), (tile_by_tile, (devices, size // devices)):
        a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
        a_shards = [part.contiguous() for part in a.reshape(*rows, size).chunk(devices, -1)]
        c_shards = [torch.full((size // devices, size), torch.nan) for _ in range(devices)]
        args = list(zip(a_shards, b.chunk(devices), c_shards, strict=True))
        common.run(program(devices, size, size, size), args)
        bound = common.rounding(size, a.double().abs() @ b.double().abs())
        common.compare(program.__name__, c_shards, (a.double() @ b.double()).chunk(devices), bound.chunk(devices))
    forms.times((phases, tile_by_tile), devices, *3 * [common.divided(4096, devices)])


if __name__ == "__main__":
    main()
