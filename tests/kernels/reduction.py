# SPDX-License-Identifier: MIT
"""Reductions and scans over the rows, columns and middle of a tile."""

import torch

from .base import PlainKernel, f64, poison, randint, randn

ROWS, COLS = 64, 64


def row_reductions(T):
    """Sum, max, min, abssum and absmax along the last dimension."""

    @T.prim_func
    def main(A: T.Tensor((ROWS, COLS), T.float32), out: T.Tensor((5, ROWS), T.float32)):
        with T.Kernel(2, threads=64) as bx:
            tile = T.alloc_fragment((32, COLS), T.float32)
            total = T.alloc_fragment((32,), T.float32)
            high = T.alloc_fragment((32,), T.float32)
            low = T.alloc_fragment((32,), T.float32)
            abs_total = T.alloc_fragment((32,), T.float32)
            abs_high = T.alloc_fragment((32,), T.float32)
            T.copy(A[bx * 32, 0], tile)
            T.reduce_sum(tile, total, dim=1)
            T.reduce_max(tile, high, dim=1)
            T.reduce_min(tile, low, dim=-1)
            T.reduce_abssum(tile, abs_total, dim=1)
            T.reduce_absmax(tile, abs_high, dim=1)
            T.copy(total, out[0, bx * 32])
            T.copy(high, out[1, bx * 32])
            T.copy(low, out[2, bx * 32])
            T.copy(abs_total, out[3, bx * 32])
            T.copy(abs_high, out[4, bx * 32])

    return main


def column_reductions(T):
    """Sum and max along dimension 0, over a loop of tiles with clear=False, from and to shared memory."""

    @T.prim_func
    def main(A: T.Tensor((ROWS, COLS), T.float32), out: T.Tensor((2, COLS), T.float32)):
        with T.Kernel(2, threads=32) as bx:
            tile = T.alloc_shared((16, 32), T.float32)
            total = T.alloc_shared((32,), T.float32)
            high = T.alloc_fragment((32,), T.float32)
            T.fill(total, 1)
            T.fill(high, -T.infinity(T.float32))
            for step in T.serial(ROWS // 16):
                T.copy(A[step * 16, bx * 32], tile)
                T.reduce_sum(tile, total, dim=0, clear=False)
                T.reduce_max(tile, high, dim=0, clear=False)
            T.copy(total, out[0, bx * 32])
            T.copy(high, out[1, bx * 32])

    return main


def bit_reductions(T):
    """And, or, xor of integer rows; the xor is folded into what the output already holds."""

    @T.prim_func
    def main(A: T.Tensor((ROWS, COLS), T.int32), seed: T.Tensor((ROWS,), T.int32), out: T.Tensor((3, ROWS), T.int32)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((ROWS, COLS), T.int32)
            both = T.alloc_fragment((ROWS,), T.int32)
            either = T.alloc_fragment((ROWS,), T.int32)
            parity = T.alloc_fragment((ROWS,), T.int32)
            T.copy(A, tile)
            T.copy(seed, parity)
            T.reduce_bitand(tile, both, dim=1)
            T.reduce_bitor(tile, either, dim=1)
            T.reduce_bitxor(tile, parity, dim=1, clear=False)
            T.copy(both, out[0, 0])
            T.copy(either, out[1, 0])
            T.copy(parity, out[2, 0])

    return main


def middle_reduction(T):
    """A 3-D fragment reduced along its middle dimension."""

    @T.prim_func
    def main(A: T.Tensor((8, 16, 32), T.float16), out: T.Tensor((8, 32), T.float32)):
        with T.Kernel(1, threads=64):
            tile = T.alloc_fragment((8, 16, 32), T.float32)
            total = T.alloc_fragment((8, 32), T.float32)
            T.copy(A, tile)
            T.reduce_sum(tile, total, dim=1)
            T.copy(total, out)

    return main


def scans(T):
    """Cumulative sums along both dimensions and backwards, and a cumulative maximum."""

    @T.prim_func
    def main(A: T.Tensor((32, 64), T.float32), out: T.Tensor((4, 32, 64), T.float32)):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((32, 64), T.float32)
            result = T.alloc_shared((32, 64), T.float32)
            regs = T.alloc_fragment((32, 64), T.float32)
            T.copy(A, tile)
            T.cumsum(tile, result, dim=0)
            T.copy(result, out[0, 0, 0])
            T.cumsum(tile, result, dim=1, reverse=True)
            T.copy(result, out[1, 0, 0])
            T.cummax(tile, result, dim=1)
            T.copy(result, out[2, 0, 0])
            T.copy(tile, regs)
            T.cumsum(regs, dim=1)
            T.copy(regs, out[3, 0, 0])

    return main


def scan_1d(T):
    """An in-place scan of one row that carries the total of the rows before it through a variable."""

    @T.prim_func
    def main(A: T.Tensor((256,), T.int32), out: T.Tensor((256,), T.int32)):
        with T.Kernel(1, threads=64):
            row = T.alloc_shared((64,), T.int32)
            carry = T.alloc_var(T.int32, init=0)
            for step in T.serial(4):
                T.copy(A[step * 64 : step * 64 + 64], row)
                T.cumsum(row)
                for i in T.Parallel(64):
                    out[step * 64 + i] = row[i] + carry
                carry = carry + row[63]
                T.sync_threads()

    return main


def _bit_reference(args):
    rows, folded = args[0].to(torch.int64), args[1].to(torch.int64)
    both, either = rows[:, 0].clone(), rows[:, 0].clone()
    for j in range(1, rows.shape[1]):
        both, either = both & rows[:, j], either | rows[:, j]
    for j in range(rows.shape[1]):
        folded = folded ^ rows[:, j]
    return {2: torch.stack([both, either, folded])}


def _row_reference(args):
    a = f64(args[0])
    return {1: torch.stack([a.sum(1), a.amax(1), a.amin(1), a.abs().sum(1), a.abs().amax(1)])}


def _scan_reference(args):
    a = f64(args[0])
    return {1: torch.stack([a.cumsum(0), a.flip(1).cumsum(1).flip(1), a.cummax(1).values, a.cumsum(1)])}


_F32 = torch.float32

KERNELS = (
    PlainKernel(
        name="row_reductions",
        build=row_reductions,
        inputs=lambda rng: [randn(rng, ROWS, COLS, dtype=_F32), poison(5, ROWS)],
        reference=_row_reference,
        covers=("reduce_sum", "reduce_max", "reduce_min", "reduce_abssum", "reduce_absmax"),
        atol=1e-4,
    ),
    PlainKernel(
        name="column_reductions",
        build=column_reductions,
        inputs=lambda rng: [randn(rng, ROWS, COLS, dtype=_F32), poison(2, COLS)],
        reference=lambda args: {1: torch.stack([f64(args[0]).sum(0) + 1, f64(args[0]).amax(0)])},
        covers=("reduce_sum", "reduce_max", "dim 0", "clear=False", "shared reduce"),
        atol=1e-4,
    ),
    PlainKernel(
        name="bit_reductions",
        build=bit_reductions,
        inputs=lambda rng: [
            randint(rng, 0, 2**30, ROWS, COLS) | 5,
            randint(rng, 0, 2**30, ROWS),
            poison(3, ROWS, dtype=torch.int32),
        ],
        reference=_bit_reference,
        covers=("reduce_bitand", "reduce_bitor", "reduce_bitxor", "clear=False"),
        rtol=0.0,
        atol=0.0,
    ),
    PlainKernel(
        name="middle_reduction",
        build=middle_reduction,
        inputs=lambda rng: [randn(rng, 8, 16, 32), poison(8, 32)],
        reference=lambda args: {1: f64(args[0]).sum(1)},
        covers=("reduce_sum", "3-D fragment", "cast in copy"),
        atol=1e-4,
    ),
    PlainKernel(
        name="scans",
        build=scans,
        inputs=lambda rng: [randn(rng, 32, 64, dtype=_F32), poison(4, 32, 64)],
        reference=_scan_reference,
        covers=("cumsum", "cummax", "reverse", "dim 0"),
        atol=1e-4,
    ),
    PlainKernel(
        name="scan_1d",
        build=scan_1d,
        inputs=lambda rng: [randint(rng, -50, 50, 256), poison(256, dtype=torch.int32)],
        reference=lambda args: {1: args[0].to(torch.int64).cumsum(0)},
        covers=("cumsum", "alloc_var", "in place"),
        rtol=0.0,
        atol=0.0,
    ),
)
