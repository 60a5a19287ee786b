# SPDX-License-Identifier: MIT
"""Sender role: one warpgroup multiplies, the other sends finished tiles to all devices.

    C = A B     A: rows over the devices     B: the whole on each     C: every device ends with the whole

    warpgroup 1    multiply tile 0 | multiply tile 1 | multiply tile 2 | ...
                          full[0]           full[1]   empty[0]
    warpgroup 0                    | send tile 0     | send tile 1     | ...

The idea: hide a network behind arithmetic inside one block. A finished tile of C goes into one of two slots in shared
memory; from there the sender writes it into the C of every device while the other warpgroup works on the next tile. The
two synchronize by barriers in shared memory as in 11, here with the multiplying warpgroup in front: it fills, the
sender empties. Without roles a block would idle while its tile is in flight.

Between devices there are two barriers, one before any device writes and one after all have: each sender writes
different rows of C, so no other ordering is needed.

Things to try: `--timeline sender.svg`, then with as many blocks as tiles; send to the peers in the order 0, 1, 2, ...
on all devices; let the receivers know of each tile (`signal=`) and use it there, as in 06.
"""

import common
import torch

import tilescale.language as T

TILE_M, TILE_N, TILE_K, STAGES = 64, 128, 64, 2


def worker_and_sender(devices: int, M: int, N: int, K: int, blocks: int = 8):
    """Distribute the tiles of C over a few blocks; in each, warpgroup 1 multiplies and warpgroup 0 sends."""
    rows = M // devices
    tiles_n = -(-N // TILE_N)
    tiles = -(-rows // TILE_M) * tiles_n
    blocks = min(blocks, tiles)

    @T.prim_func
    def gemm_and_send(
        A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((devices, rows, N), "float32")
    ):
        with T.Kernel(device=devices, block=blocks, threads=256) as block:
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                T.barrier()  # every C is free
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                done = T.alloc((STAGES, TILE_M, TILE_N), "float32", level="l1")
                full = T.alloc_barrier([128] * STAGES)
                empty = T.alloc_barrier([128] * STAGES)
                with T.Scale("warpgroup") as (wg, _), T.Scale("device") as (rank, size):
                    c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                    for iteration in T.serial(T.ceildiv(tiles - block, blocks)):
                        tile, stage, used = block + iteration * blocks, iteration % STAGES, iteration // STAGES
                        row, col = tile // tiles_n * TILE_M, tile % tiles_n * TILE_N
                        if wg == 1:
                            T.clear(c)
                            for k in T.serial(T.ceildiv(K, TILE_K)):
                                T.copy(A_dev[row, k * TILE_K], a)
                                T.copy(B[k * TILE_K, col], b)
                                T.gemm(a, b, c)
                            T.barrier_wait(empty[stage], (used + 1) % 2)
                            T.copy(c, done[stage, :, :])
                            T.barrier_arrive(full[stage])
                        else:
                            T.barrier_wait(full[stage], used % 2)
                            for step in T.serial(size):
                                T.copy(done[stage, :, :], C[rank, row, col], dst=(rank + step) % size)
                            T.barrier_arrive(empty[stage])
            with T.Scale("device"):
                T.barrier()  # every C is complete

    return gemm_and_send


@common.options(size=1024)
def main(devices: int, size: int, seed: int) -> None:
    """Multiply (size, size) matrices, A split by rows; every device ends with all of C."""
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices)
    a, b = (torch.randn(size, size, generator=rng).bfloat16() for _ in range(2))
    shape = (devices, size // devices, size)
    results = [torch.full(shape, torch.nan) for _ in range(devices)]
    args = list(zip(a.chunk(devices), [b] * devices, results, strict=True))
    common.run(worker_and_sender(devices, size, size, size), args)
    want = (a.double() @ b.double()).reshape(shape)
    bound = common.rounding(size, a.double().abs() @ b.double().abs()).reshape(shape)
    common.compare("worker and sender", results, [want] * devices, [bound] * devices)


if __name__ == "__main__":
    main()
