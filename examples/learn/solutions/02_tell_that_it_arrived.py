# SPDX-License-Identifier: MIT
"""Solution: data then signal on one side, wait then data on the other. `signal=` keeps the first two together.

Nothing can deadlock: every block sends before it waits, and waits for the block of the same number.
"""

import tilescale.language as T

BLOCKS, TILE = 4, 16


def program(devices: int):
    """Put with a signal, then wait."""

    @T.prim_func
    def tell_that_it_arrived(
        X: T.Tensor((BLOCKS, TILE, TILE), "float32"),
        Y: T.Tensor((BLOCKS, TILE, TILE), "float32"),
    ):
        with T.Kernel(device=devices, block=BLOCKS, threads=128) as b:
            inbox = T.alloc((BLOCKS, TILE, TILE), "float32", level="l2")
            arrived = T.alloc((BLOCKS,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.barrier()  # all flags are down before any device raises one
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(X[b, 0, 0], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, inbox[b, 0, 0], dst=(rank + 1) % size, signal=arrived[b])
                    T.wait(arrived[b], ">=", 1)
                T.copy(inbox[b, 0, 0], tile)
                for i, j in T.Parallel(TILE, TILE):
                    tile[i, j] *= 2
                T.copy(tile, Y[b, 0, 0])

    return tell_that_it_arrived
