# SPDX-License-Identifier: MIT
"""Uses of reductions: softmax, norms, a matrix-vector product, top-k."""

import torch

from .base import PlainKernel, f64, poison, randn

ROWS, COLS = 64, 64


def online_softmax(T):
    """Row softmax over column blocks: first pass keeps a running maximum and denominator, second pass writes."""
    block = 32

    @T.prim_func
    def main(A: T.Tensor((ROWS, 96), T.float16), out: T.Tensor((ROWS, 96), T.float16)):
        with T.Kernel(ROWS // 32, threads=64) as bx:
            tile = T.alloc_fragment((32, block), T.float32)
            high = T.alloc_fragment((32,), T.float32)
            previous = T.alloc_fragment((32,), T.float32)
            partial = T.alloc_fragment((32,), T.float32)
            total = T.alloc_fragment((32,), T.float32)
            T.fill(high, -T.infinity(T.float32))
            T.clear(total)
            for step in T.serial(96 // block):
                T.copy(A[bx * 32, step * block], tile)
                T.copy(high, previous)
                T.reduce_max(tile, high, dim=1, clear=False)
                for i, j in T.Parallel(32, block):
                    tile[i, j] = T.exp(tile[i, j] - high[i])
                T.reduce_sum(tile, partial, dim=1)
                for i in T.Parallel(32):
                    total[i] = total[i] * T.exp(previous[i] - high[i]) + partial[i]
            for step in T.serial(96 // block):
                T.copy(A[bx * 32, step * block], tile)
                for i, j in T.Parallel(32, block):
                    tile[i, j] = T.exp(tile[i, j] - high[i]) / total[i]
                T.copy(tile, out[bx * 32, step * block])

    return main


def layer_norm(T):
    @T.prim_func
    def main(
        A: T.Tensor((ROWS, COLS), T.bfloat16),
        gain: T.Tensor((COLS,), T.float32),
        shift: T.Tensor((COLS,), T.float32),
        out: T.Tensor((ROWS, COLS), T.float32),
    ):
        with T.Kernel(ROWS // 32, threads=128) as bx:
            tile = T.alloc_fragment((32, COLS), T.float32)
            square = T.alloc_fragment((32, COLS), T.float32)
            mean = T.alloc_fragment((32,), T.float32)
            variance = T.alloc_fragment((32,), T.float32)
            T.copy(A[bx * 32, 0], tile)
            T.reduce_sum(tile, mean, dim=1)
            for i, j in T.Parallel(32, COLS):
                tile[i, j] = tile[i, j] - mean[i] / COLS
            for i, j in T.Parallel(32, COLS):
                square[i, j] = tile[i, j] * tile[i, j]
            T.reduce_sum(square, variance, dim=1)
            for i, j in T.Parallel(32, COLS):
                tile[i, j] = tile[i, j] * T.rsqrt(variance[i] / COLS + 1e-5) * gain[j] + shift[j]
            T.copy(tile, out[bx * 32, 0])

    return main


def rms_norm(T):
    """One row a block; the squares are summed by a reducer over column blocks."""

    @T.prim_func
    def main(A: T.Tensor((4, 256), T.float16), gain: T.Tensor((256,), T.float16), out: T.Tensor((4, 256), T.float16)):
        with T.Kernel(4, threads=64) as bx:
            row = T.alloc_shared((256,), T.float16)
            squares = T.alloc_reducer((1,), T.float32, op="sum")
            total = T.alloc_fragment((1,), T.float32)
            T.copy(A[bx, :], row)
            T.reducer_init(squares)
            for j in T.Parallel(256):
                T.reducer_update(squares[0], T.cast(row[j], T.float32) * T.cast(row[j], T.float32))
            T.finalize_reducer(squares, total)
            for j in T.Parallel(256):
                out[bx, j] = T.cast(T.cast(row[j], T.float32) * T.rsqrt(total[0] / 256 + 1e-6), T.float16) * gain[j]

    return main


def reducer_gemv(T):
    """y = A @ x with the row sums and the row maxima of the products collected by reducers."""

    @T.prim_func
    def main(A: T.Tensor((32, 128), T.float32), x: T.Tensor((128,), T.float32), out: T.Tensor((2, 32), T.float32)):
        with T.Kernel(1, threads=32):
            a_tile = T.alloc_shared((32, 64), T.float32)
            sums = T.alloc_reducer((32,), T.float32, op="sum")
            peaks = T.alloc_reducer((32,), T.float32, op="max")
            sum_regs = T.alloc_fragment((32,), T.float32)
            peak_regs = T.alloc_fragment((32,), T.float32)
            T.reducer_init(sums, 0.5)
            T.reducer_init(peaks)
            for step in T.serial(2):
                T.copy(A[0, step * 64], a_tile)
                for i, j in T.Parallel(32, 64):
                    T.reducer_update(sums[i], a_tile[i, j] * x[step * 64 + j])
                for i, j in T.Parallel(32, 64):
                    T.reducer_update(peaks[i], a_tile[i, j] * x[step * 64 + j])
            T.finalize_reducer(sums, sum_regs)
            T.finalize_reducer(peaks, peak_regs)
            T.copy(sum_regs, out[0, 0])
            T.copy(peak_regs, out[1, 0])

    return main


def top_k(T):
    """The two largest values of each row and their columns: reduce, find the first column that holds it, mask it."""
    k = 2

    @T.prim_func
    def main(
        A: T.Tensor((32, 64), T.float32),
        values: T.Tensor((32, k), T.float32),
        columns: T.Tensor((32, k), T.int32),
    ):
        with T.Kernel(1, threads=64):
            tile = T.alloc_fragment((32, 64), T.float32)
            where = T.alloc_fragment((32, 64), T.int32)
            high = T.alloc_fragment((32,), T.float32)
            column = T.alloc_fragment((32,), T.int32)
            T.copy(A, tile)
            for step in T.unroll(k):
                T.reduce_max(tile, high, dim=1)
                for i, j in T.Parallel(32, 64):
                    where[i, j] = T.if_then_else(tile[i, j] == high[i], j, 64)
                T.reduce_min(where, column, dim=1)
                for i, j in T.Parallel(32, 64):
                    if j == column[i]:
                        tile[i, j] = -T.infinity(T.float32)
                for i in T.Parallel(32):
                    values[i, step] = high[i]
                    columns[i, step] = column[i]

    return main


def _layer_norm_reference(args):
    return {3: torch.nn.functional.layer_norm(f64(args[0]), (COLS,), f64(args[1]), f64(args[2]), 1e-5)}


def _rms_reference(args):
    a = f64(args[0])
    return {2: a * torch.rsqrt(a.square().mean(1, keepdim=True) + 1e-6) * f64(args[1])}


def _gemv_reference(args):
    products = f64(args[0]) * f64(args[1])
    return {2: torch.stack([products.sum(1) + 0.5, products.amax(1)])}


def _top_k_reference(args):
    values, columns = torch.topk(f64(args[0]), 2, dim=1)
    return {1: values, 2: columns}


_F32 = torch.float32

KERNELS = (
    PlainKernel(
        name="online_softmax",
        build=online_softmax,
        inputs=lambda rng: [randn(rng, ROWS, 96, scale=3.0), poison(ROWS, 96, dtype=torch.float16)],
        reference=lambda args: {1: torch.softmax(f64(args[0]), 1)},
        covers=("reduce_max", "reduce_sum", "exp", "infinity"),
        atol=1e-3,
    ),
    PlainKernel(
        name="layer_norm",
        build=layer_norm,
        inputs=lambda rng: [
            randn(rng, ROWS, COLS, dtype=torch.bfloat16),
            randn(rng, COLS, dtype=_F32),
            randn(rng, COLS, dtype=_F32),
            poison(ROWS, COLS),
        ],
        reference=_layer_norm_reference,
        covers=("reduce_sum", "rsqrt", "broadcast"),
        atol=1e-3,
    ),
    PlainKernel(
        name="rms_norm",
        build=rms_norm,
        inputs=lambda rng: [randn(rng, 4, 256), randn(rng, 256), poison(4, 256, dtype=torch.float16)],
        reference=_rms_reference,
        covers=("alloc_reducer", "reducer_update", "finalize_reducer", "rsqrt"),
    ),
    PlainKernel(
        name="reducer_gemv",
        build=reducer_gemv,
        inputs=lambda rng: [randn(rng, 32, 128, dtype=_F32), randn(rng, 128, dtype=_F32), poison(2, 32)],
        reference=_gemv_reference,
        covers=("alloc_reducer", "reducer_init", "finalize_reducer", "max reducer"),
        atol=1e-4,
    ),
    PlainKernel(
        name="top_k",
        build=top_k,
        inputs=lambda rng: [
            randn(rng, 32, 64, dtype=_F32),
            poison(32, 2),
            poison(32, 2, dtype=torch.int32),
        ],
        reference=_top_k_reference,
        covers=("reduce_max", "reduce_min", "if_then_else", "arg-max"),
        rtol=0.0,
        atol=0.0,
    ),
)
