# SPDX-License-Identifier: MIT
"""Solution: a barrier at the entry ensures that every inbox has been read; the flag counts across launches and is never
cleared.

A barrier at the exit would also do. Two inboxes, used alternately, need no barrier if a device waits for all parts. It
then knows that every device has entered this launch, so no device still reads the inbox of the launch before the
previous one.
"""

import tilescale.language as T

LAUNCHES, TILE = 3, 16


def program(devices: int):
    """Handshake, send, wait, add up."""

    @T.prim_func
    def reduce_scatter(
        X: T.Tensor((LAUNCHES, devices, TILE, TILE), "float32"),
        inbox: T.Tensor((devices, TILE, TILE), "float32"),
        arrived: T.Tensor((1,), "int32"),  # zero before the first launch
        Y: T.Tensor((LAUNCHES, TILE, TILE), "float32"),
    ):
        for launch in T.serial(LAUNCHES):
            with T.Kernel(device=devices, block=1, threads=128):
                with T.Scale("device"):
                    T.barrier()  # every inbox has been read
                with T.Scale("block"):
                    tile = T.alloc((TILE, TILE), "float32", level="l1")
                    total = T.alloc((TILE, TILE), "float32", level="l0")
                    with T.Scale("device") as (rank, size):
                        for step in T.serial(size):
                            owner = (rank + step) % size
                            T.copy(X[launch, owner, 0, 0], tile)
                            T.copy(tile, inbox[rank, 0, 0], dst=owner, signal=arrived[0])
                        T.wait(arrived[0], ">=", (launch + 1) * size)
                        T.clear(total)
                        for r in T.serial(size):
                            T.copy(inbox[r, 0, 0], tile)
                            for i, j in T.Parallel(TILE, TILE):
                                total[i, j] += tile[i, j]
                    T.copy(total, Y[launch, 0, 0])

    return reduce_scatter
