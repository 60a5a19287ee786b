# SPDX-License-Identifier: MIT
"""A chain of GEMMs: each device multiplies the previous one's result of a batch, while that one has the next batch."""

from typing import Any

import tilescale.language as T

TILE = 64


def chain(devices: int, batches: int, rows: int, width: int) -> Any:
    """Y of the last device = X of the first @ W of each; blocks send their tiles as they have them."""

    @T.prim_func
    def chain(
        X: T.Tensor((batches, rows, width), "float16"),
        W: T.Tensor((width, width), "float16"),
        Y: T.Tensor((batches, rows, width), "float16"),
    ):
        with T.Kernel(device=devices, block=(width // TILE, batches), threads=128) as (bx, batch):
            with T.Scale("device"):
                inbox = T.alloc((batches, rows, width), "float16", level="l2")
                ready = T.alloc_flags((batches,))
            with T.Scale("block"), T.Scale("device") as (rank, size):
                x = T.alloc((rows, TILE), "float16", level="l1")
                w = T.alloc((TILE, TILE), "float16", level="l1")
                y = T.alloc((rows, TILE), "float32", level="l0")
                out = T.alloc((rows, TILE), "float16", level="l1")
                T.clear(y)
                if rank > 0:
                    T.wait(ready[batch], ">=", width // TILE)
                for k in T.Pipelined(width // TILE, num_stages=2):
                    if rank == 0:
                        T.copy(X[batch, 0, k * TILE], x)
                    else:
                        T.copy(inbox[batch, 0, k * TILE], x)
                    T.copy(W[k * TILE, bx * TILE], w)
                    T.gemm(x, w, y)
                T.copy(y, out)
                if rank < size - 1:
                    T.copy(out, inbox[batch, 0, bx * TILE], dst=rank + 1, signal=ready[batch])
                else:
                    T.copy(out, Y[batch, 0, bx * TILE])

    return chain
