# SPDX-License-Identifier: MIT
"""Solution: before step s the sender needs s - 1 slots back, since two were free from the start.

A ring passes each tile over each link once and never more than one at a time, so all links are busy in every step.
"""

import tilescale.language as T

BLOCKS, TILE = 2, 16


def program(devices: int):
    """Wait for a credit, put, wait for a tile, copy it, return a credit."""

    @T.prim_func
    def ring_all_gather(
        X: T.Tensor((BLOCKS, TILE, TILE), "float32"),
        Y: T.Tensor((devices, BLOCKS, TILE, TILE), "float32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((2, BLOCKS, TILE, TILE), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            free = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.clear(free)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device") as (rank, size):
                    left = (rank + size - 1) % size
                    right = (rank + 1) % size
                    T.copy(tile, Y[rank, b, 0, 0])
                    for step in T.serial(size - 1):
                        T.wait(free[b], ">=", step - 1)
                        T.copy(tile, inbox[step % 2, b, 0, 0], dst=right, signal=arrived[b])
                        T.wait(arrived[b], ">=", step + 1)
                        T.copy(inbox[step % 2, b, 0, 0], tile)
                        T.signal(free[b], dst=left)
                        T.copy(tile, Y[(rank + size - step - 1) % size, b, 0, 0])
            with T.Scale("device"):
                T.barrier()  # the last flags have been raised before any device clears them again

    return ring_all_gather
