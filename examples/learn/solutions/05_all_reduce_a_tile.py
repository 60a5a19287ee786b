# SPDX-License-Identifier: MIT
"""Solution: send, count to `size`, add in the order of the ranks.

One step, but n tiles arrive at every device: good for small tiles. For large ones a reduce-scatter and an all-gather
move 2 / n of that (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005).
"""

import tilescale.language as T

BLOCKS, TILE = 2, 16


def program(devices: int):
    """Send from every device to every device, in one step."""

    @T.prim_func
    def all_reduce(X: T.Tensor((BLOCKS, TILE, TILE), "float32"), Y: T.Tensor((BLOCKS, TILE, TILE), "float32")):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((devices, BLOCKS, TILE, TILE), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                total = T.alloc((TILE, TILE), "float32", level="l0")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(size):
                        T.copy(tile, inbox[rank, b, 0, 0], dst=(rank + step) % size, signal=arrived[b])
                    T.wait(arrived[b], ">=", size)
                    T.clear(total)
                    for r in T.serial(size):
                        T.copy(inbox[r, b, 0, 0], tile)
                        for i, j in T.Parallel(TILE, TILE):
                            total[i, j] += tile[i, j]
                T.copy(total, Y[b, 0, 0])

    return all_reduce
