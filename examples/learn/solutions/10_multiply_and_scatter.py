# SPDX-License-Identifier: MIT
"""Solution: owner by owner, the next device's rows first; put each tile with a signal; add up the parts owned here.

A device's last tile is its own, which is not sent. By then the other parts have had the time of all earlier GEMMs to
arrive.
"""

import tilescale.language as T

BLOCKS, TILE, STEP = 2, 32, 32
ROWS, COLUMNS = TILE, BLOCKS * TILE


def program(devices: int):
    """Multiply and send, then wait and add up."""

    @T.prim_func
    def multiply_and_scatter(
        A: T.Tensor((devices, ROWS, STEP * devices), "bfloat16"),  # columns over the devices; first index: owner
        B: T.Tensor((STEP * devices, COLUMNS), "bfloat16"),  # rows over the devices
        C: T.Tensor((ROWS, COLUMNS), "float32"),  # this rank's rows
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((devices, ROWS, COLUMNS), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                T.clear(arrived)
                T.barrier()  # all flags are down, every inbox is free
            with T.Scale("block"):
                a = T.alloc((TILE, STEP), "bfloat16", level="l1")
                w = T.alloc((STEP, TILE), "bfloat16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                part = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(B_dev[0, b * TILE], w)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(size):
                        owner = (rank + step + 1) % size
                        T.copy(A_dev[owner, 0, 0], a)
                        T.clear(c)
                        T.gemm(a, w, c)
                        T.copy(c, part)
                        T.copy(part, inbox[rank, 0, b * TILE], dst=owner, signal=arrived[b])
                    T.wait(arrived[b], ">=", size)
                    T.clear(c)
                    for r in T.serial(size):
                        T.copy(inbox[r, 0, b * TILE], part)
                        for i, j in T.Parallel(TILE, TILE):
                            c[i, j] += part[i, j]
                T.copy(c, C[0, b * TILE])

    return multiply_and_scatter
