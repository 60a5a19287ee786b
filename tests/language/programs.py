# SPDX-License-Identifier: MIT
"""Reference programs in TileScale's language, as factories of traced functions: two of the examples, and small ones."""

from typing import Any

import tilescale.language as T
from tests.ladder import NUMBERED, load

_gemm, _attention = load(NUMBERED[8]), load(NUMBERED[9])
tensor_parallel_gemm = _gemm.tp_gemm
context_parallel_mla, gathered, exchanged = _attention.cp_mla, _attention.gathered, _attention.exchanged


def ring_shift(columns: int = 64, tile: int = 16) -> Any:
    """Every device sends its tensor to the next one, tile by tile, each with a signal that the receiver waits for."""
    rows = T.dynamic("rows")

    @T.prim_func
    def shift(
        X: T.Tensor((rows, columns), "float16"),
        Y: T.Tensor((rows, columns), "float16"),
        flags: T.Tensor((T.ceildiv(rows, tile),), "int32"),
    ):
        with T.Kernel(device=T.ALL, block=T.ceildiv(rows, tile), threads=128) as bx:
            part = T.alloc((tile, columns), "float16", level="l1")
            with T.Scale("block"), T.Scale("device") as rank, size:
                T.copy(X[bx * tile, 0], part)
                T.copy(part, Y[bx * tile, 0], dst=(rank + 1) % size, signal=flags[bx])
                T.wait(flags[bx], ">=", 1)

    return shift


def cluster_sum(rows: int = 8, columns: int = 64, cluster: int = 2) -> Any:
    """Row sums: the blocks of a cluster split a row and collect their parts in the first block's shared memory."""
    share = columns // cluster

    @T.prim_func
    def row_sums(X: T.Tensor((rows, columns), "float32"), S: T.Tensor((rows,), "float32")):
        with T.Kernel(cta_cluster=cluster, block=(cluster, rows), threads=64) as (bx, by):
            part = T.alloc((1, share), "float32", level="l0")
            total = T.alloc((1,), "float32", level="l0")
            mine = T.alloc((1,), "float32", level="l1")
            all_parts = T.alloc((cluster,), "float32", level="l1")
            T.copy(X[by, bx * share], part)
            T.reduce_sum(part, total, dim=1)
            T.copy(total, mine)
            with T.Scale("block") as rank, size:
                T.barrier()
                T.copy(mine, all_parts[rank : rank + 1], dst=0)
                T.barrier()
                if rank == 0:
                    S[by] = 0
                    for i in T.serial(size):
                        S[by] = S[by] + all_parts[i]

    return row_sums


def power_iteration(n: int = 32, steps: int = 3, devices: int = 2) -> Any:
    """x <- A x / max(A x), the rows of A split over the devices: a loop around grid phases and collectives."""
    rows = n // devices

    @T.prim_func
    def power(A: T.Tensor((n, n), "float32"), X: T.Tensor((n,), "float32")):
        with T.Kernel(device=devices, block=rows, threads=32) as bx:
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                product = T.alloc((rows,), "float32", level="l2")
                top = T.alloc((1,), "float32", level="l2")
            row = rows - 1 - bx
            for _ in T.serial(steps):
                with T.Scale("block"):
                    line = T.alloc((1, n), "float32", level="l0")
                    total = T.alloc((1,), "float32", level="l0")
                    for j in T.Parallel(n):
                        line[0, j] = A_dev[row, j] * X[j]
                    T.reduce_sum(line, total, dim=1)
                    T.copy(total, product[row])
                with T.Scale("device"):
                    T.all_gather(product, X)
                    top[0] = 0
                    for i in T.serial(rows):
                        top[0] = T.max(top[0], T.abs(product[i]))
                    T.allreduce(top, op="max")
                    for i in T.serial(n):
                        X[i] = X[i] / top[0]

    return power
