# SPDX-License-Identifier: MIT
"""Reference programs in TileScale's language, as factories of traced functions."""

import math
from typing import Any

import tilescale.language as T


def tensor_parallel_gemm(
    m: int, n: int, k: int, tile: tuple[int, int, int] = (64, 64, 32), devices: int = 4, dtype: str = "bfloat16"
) -> Any:
    """C = A B: the devices split K; in each block two warpgroups split the K tile and all-reduce their fragments."""
    tm, tn, tk = tile

    @T.prim_func
    def tp_gemm(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(n, tn), T.ceildiv(m, tm)), threads=256) as (bx, by):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                C_dev = T.view(C, layout=T.Replica)
            with T.Scale("block"):
                a = T.alloc((tm, tk), dtype, level="l1")
                b = T.alloc((tk, tn), dtype, level="l1")
                c = T.alloc((tm, tn), "float32", level="l0")
                with T.Scale("warpgroup"):
                    T.clear(T.view(c, layout=T.Replica))
                for step in T.Pipelined(T.ceildiv(A_dev.shape[1], tk), num_stages=3):
                    T.copy(A_dev[by * tm, step * tk], a)
                    T.copy(B_dev[step * tk, bx * tn], b)
                    with T.Scale("warpgroup"):
                        T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
                with T.Scale("warpgroup"):
                    T.allreduce(T.view(c, layout=T.Replica))
                T.copy(c, C_dev[by * tm, bx * tn])
            with T.Scale("device"):
                T.allreduce(C_dev)

    return tp_gemm


def merge(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two partial softmax averages, each with its log2-sum of exponentials, as one."""
    (o1, l1), (o2, l2) = first, second
    top = T.max(l1, l2)
    w1, w2 = T.exp2(l1 - top), T.exp2(l2 - top)
    return (o1 * w1 + o2 * w2) / (w1 + w2), top + T.log2(w1 + w2)


def _softmax_step(block_h: int, block_n: int, dim: int, scale: float) -> Any:
    @T.macro
    def softmax_step(scores, top, total, acc):
        """Online softmax: scores become exponentials; the running maximum, sum and accumulator follow."""
        before = T.alloc((block_h,), "float32", level="l0")
        shrink = T.alloc((block_h,), "float32", level="l0")
        added = T.alloc((block_h,), "float32", level="l0")
        T.copy(top, before)
        T.reduce_max(scores, top, dim=1, clear=False)
        for i in T.Parallel(block_h):
            shrink[i] = T.exp2((before[i] - top[i]) * scale)
        for i, j in T.Parallel(block_h, block_n):
            scores[i, j] = T.exp2((scores[i, j] - top[i]) * scale)
        T.reduce_sum(scores, added, dim=1)
        for i in T.Parallel(block_h):
            total[i] = total[i] * shrink[i] + added[i]
        for i, j in T.Parallel(block_h, dim):
            acc[i, j] = acc[i, j] * shrink[i]

    return softmax_step


@T.macro
def scores_of(q, q_pe, kv, k_pe, scores):
    """Each warpgroup scores its half of the keys."""
    with T.Scale("warpgroup"):
        mine = T.view(scores, layout=T.FullCol)
        T.gemm(q, T.view(kv, layout=T.FullRow), mine, transpose_B=True, clear_accum=True)
        T.gemm(q_pe, T.view(k_pe, layout=T.FullRow), mine, transpose_B=True)


@T.macro
def weigh_gathered(scores, weights, kv, acc):
    """The warpgroups gather all weights; each adds the weighted values to its columns of the accumulator."""
    with T.Scale("warpgroup"):
        half = T.view(weights, layout=T.FullCol)
        T.copy(T.view(scores, layout=T.FullCol), half)
        T.all_gather(half)
        T.gemm(weights, T.view(kv, layout=T.FullCol), T.view(acc, layout=T.FullCol))


@T.macro
def weigh_exchanged(scores, weights, kv, acc):
    """The same with a copy of each half to the other warpgroup."""
    with T.Scale("warpgroup") as wg, wgs:
        half_n = weights.shape[1] // wgs
        half = T.alloc((weights.shape[0], half_n), weights.dtype, level="l1")
        other = T.alloc((weights.shape[0], half_n), weights.dtype, level="l1")
        T.copy(T.view(scores, layout=T.FullCol), half)
        peer = (wg + 1) % wgs
        T.copy(half, other, dst=peer)
        T.barrier()
        values, mine = T.view(kv, layout=T.FullCol), T.view(acc, layout=T.FullCol)
        T.gemm(half, values[wg * half_n : (wg + 1) * half_n, :], mine)
        T.gemm(other, values[peer * half_n : (peer + 1) * half_n, :], mine)
        T.barrier()


def context_parallel_mla(
    batch: int,
    heads: int,
    seq: int,
    dim: int,
    pe_dim: int,
    block_h: int = 16,
    block_n: int = 32,
    devices: int = 4,
    weigh: Any = weigh_gathered,
    dtype: str = "float16",
) -> Any:
    """FlashMLA decode: the devices split the keys by sequence, the two warpgroups of a block the scores of a tile.

    Args:
        weigh: how the warpgroups exchange their halves of the scores, `weigh_gathered` or `weigh_exchanged`.
    """
    scale = math.log2(math.e) / math.sqrt(dim + pe_dim)
    softmax_step = _softmax_step(block_h, block_n, dim, scale)

    @T.prim_func
    def cp_mla(
        Q: T.Tensor((batch, heads, dim), dtype),
        Q_pe: T.Tensor((batch, heads, pe_dim), dtype),
        KV: T.Tensor((batch, seq, 1, dim), dtype),
        K_pe: T.Tensor((batch, seq, 1, pe_dim), dtype),
        Output: T.Tensor((batch, heads, dim), "float32"),
    ):
        with T.Kernel(device=devices, block=(batch, heads // block_h), threads=256) as (bx, by):
            with T.Scale("device"):
                Q_dev = T.view(Q, layout=T.Replica)
                Q_pe_dev = T.view(Q_pe, layout=T.Replica)
                KV_dev = T.view(KV, layout=lambda b, s, h, d: s // (seq // devices))
                K_pe_dev = T.view(K_pe, layout=lambda b, s, h, d: s // (seq // devices))
                output = T.view(Output, layout=T.Replica)
                logsum = T.alloc((batch, heads), "float32", level="l2")
            with T.Scale("block"):
                q = T.alloc((block_h, dim), dtype, level="l1")
                q_pe = T.alloc((block_h, pe_dim), dtype, level="l1")
                kv = T.alloc((block_n, dim), dtype, level="l1")
                k_pe = T.alloc((block_n, pe_dim), dtype, level="l1")
                scores = T.alloc((block_h, block_n), "float32", level="l0")
                weights = T.alloc((block_h, block_n), dtype, level="l1")
                acc = T.alloc((block_h, dim), "float32", level="l0")
                top = T.alloc((block_h,), "float32", level="l0")
                total = T.alloc((block_h,), "float32", level="l0")
                T.copy(Q_dev[bx, by * block_h, 0], q)
                T.copy(Q_pe_dev[bx, by * block_h, 0], q_pe)
                T.clear(acc)
                T.clear(total)
                T.fill(top, -1e30)
                for step in T.Pipelined(KV_dev.shape[1] // block_n, num_stages=2):
                    T.copy(KV_dev[bx, step * block_n : (step + 1) * block_n, 0, :], kv)
                    T.copy(K_pe_dev[bx, step * block_n : (step + 1) * block_n, 0, :], k_pe)
                    scores_of(q, q_pe, kv, k_pe, scores)
                    softmax_step(scores, top, total, acc)
                    weigh(scores, weights, kv, acc)
                for i, j in T.Parallel(block_h, dim):
                    acc[i, j] = acc[i, j] / total[i]
                for i in T.Parallel(block_h):
                    total[i] = T.log2(total[i]) + top[i] * scale
                T.copy(acc, output[bx, by * block_h, 0])
                T.copy(total, logsum[bx, by * block_h])
            with T.Scale("device"):
                T.allreduce(output, logsum, fn=merge)

    return cp_mla


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
