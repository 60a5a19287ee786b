# SPDX-License-Identifier: MIT
"""Ring attention in phases (Liu et al., 2023): a grid for each share of keys and values, then the copies to the next.

Between turns the device's memory keeps, for each query, the maximum of its scores, the sum of its weights, and the
weighted sum of values.
"""

import math
from typing import Any

import tilescale.language as T
from tests.ladder import NUMBERED, load


def in_phases(devices: int, heads: int, tokens: int, dim: int, tile: int, threads: int = 128) -> Any:
    """Q, K and V are split over the devices by tokens; block (i, h) works on tile i of the queries of head h."""
    load(NUMBERED[13])  # puts its neighbours among the modules
    import attention

    rows, scale = tokens // devices, math.log2(math.e) / math.sqrt(dim)

    @T.prim_func
    def ring_attention(
        Q: T.Tensor((heads, tokens // devices, dim), "float16"),
        KV: T.Tensor((2, heads, tokens // devices, dim), "float16"),
        Out: T.Tensor((heads, tokens // devices, dim), "float32"),
    ):
        with T.Kernel(device=devices, block=(rows // tile, heads), threads=threads) as (i, h):
            share = T.alloc((2, 2, heads, rows, dim), "float16", level="l2")
            tops = T.alloc((heads, rows), "float32", level="l2")
            totals = T.alloc((heads, rows), "float32", level="l2")
            with T.Scale("device"):
                T.copy(KV, share[0, 0:2, 0:heads, 0:rows, 0:dim])
                T.barrier()
            for step in T.serial(devices):
                with T.Scale("block"):
                    q = T.alloc((tile, dim), "float16", level="l1")
                    k = T.alloc((tile, dim), "float16", level="l1")
                    v = T.alloc((tile, dim), "float16", level="l1")
                    scores = T.alloc((tile, tile), "float32", level="l0")
                    weights = T.alloc((tile, tile), "float16", level="l1")
                    acc = T.alloc((tile, dim), "float32", level="l0")
                    top = T.alloc((tile,), "float32", level="l0")
                    total = T.alloc((tile,), "float32", level="l0")
                    T.copy(Q[h, i * tile, 0], q)
                    if step == 0:
                        T.clear(acc)
                        T.clear(total)
                        T.fill(top, -1e30)
                    else:
                        T.copy(Out[h, i * tile, 0], acc)
                        T.copy(tops[h, i * tile], top)
                        T.copy(totals[h, i * tile], total)
                    for t in T.serial(rows // tile):
                        T.copy(share[step % 2, 0, h, t * tile, 0], k)
                        T.copy(share[step % 2, 1, h, t * tile, 0], v)
                        T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                        attention.softmax_step(scores, top, total, acc, scale)
                        T.copy(scores, weights)
                        T.gemm(weights, v, acc)
                    if step == devices - 1:
                        for r, j in T.Parallel(tile, dim):
                            acc[r, j] = acc[r, j] / total[r]
                    T.copy(acc, Out[h, i * tile, 0])
                    T.copy(top, tops[h, i * tile])
                    T.copy(total, totals[h, i * tile])
                with T.Scale("device") as (rank, size):
                    if step < devices - 1:
                        T.copy(
                            share[step % 2, 0:2, 0:heads, 0:rows, 0:dim],
                            share[(step + 1) % 2, 0:2, 0:heads, 0:rows, 0:dim],
                            dst=(rank + 1) % size,
                        )
                        T.barrier()

    return ring_attention
