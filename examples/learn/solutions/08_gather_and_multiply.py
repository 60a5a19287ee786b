# SPDX-License-Identifier: MIT
"""Solution: a flag for each shard counts its pieces, and device r takes the shards r, r + 1, r + 2, ...

So a device computes with its local shard while the others are in flight, and in every step the devices read different
shards. All blocks of a device run at the same time (two always fit). In a larger grid the resident blocks could wait
for pieces of blocks that have not started.
"""

import tilescale.language as T

BLOCKS, TILE, K, STEP = 2, 32, 64, 32
ROWS = BLOCKS * TILE


def program(devices: int):
    """Send, then compute shard by shard."""
    columns = BLOCKS * TILE * devices

    @T.prim_func
    def gather_and_multiply(
        A: T.Tensor((devices, ROWS, K), "bfloat16"),
        B: T.Tensor((K, columns), "bfloat16"),
        C: T.Tensor((devices, ROWS, columns), "float32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            gathered = T.alloc((devices, ROWS, K), "bfloat16", level="l2")
            arrived = T.alloc((devices,), "int32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)  # (1, ROWS, K): the local shard
                B_dev = T.view(B, layout=T.FullCol)  # (K, BLOCKS * TILE)
                C_dev = T.view(C, layout=T.FullCol)  # (devices, ROWS, BLOCKS * TILE)
                T.clear(arrived)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                a = T.alloc((TILE, STEP), "bfloat16", level="l1")
                w = T.alloc((STEP, TILE), "bfloat16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    for k in T.serial(K // STEP):
                        T.copy(A_dev[0, b * TILE, k * STEP], a)
                        for step in T.serial(size):
                            peer = (rank + step) % size
                            T.copy(a, gathered[rank, b * TILE, k * STEP], dst=peer, signal=arrived[rank])
                    for step in T.serial(size):
                        shard = (rank + step) % size
                        T.wait(arrived[shard], ">=", BLOCKS * (K // STEP))
                        for m in T.serial(BLOCKS):
                            T.clear(c)
                            for k in T.Pipelined(K // STEP, num_stages=2):
                                T.copy(gathered[shard, m * TILE, k * STEP], a)
                                T.copy(B_dev[k * STEP, b * TILE], w)
                                T.gemm(a, w, c)
                            T.copy(c, C_dev[shard, m * TILE, b * TILE])

    return gather_and_multiply
