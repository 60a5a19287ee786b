# SPDX-License-Identifier: MIT
"""Access through indices and computed positions: gather, scatter, windows, rotations; quantisation by row."""

import torch

from .base import PlainKernel, f64, poison, randint, randn


def embedding(T):
    """Rows gathered by index; an index of -1 yields a row of zeros."""
    tokens, width, table_rows = 24, 64, 40

    @T.prim_func
    def main(
        index: T.Tensor((tokens,), T.int32),
        table: T.Tensor((table_rows, width), T.float16),
        out: T.Tensor((tokens, width), T.float16),
    ):
        with T.Kernel(tokens // 8, threads=64) as bx:
            tile = T.alloc_shared((8, width), T.float16)
            for i, j in T.Parallel(8, width):
                tile[i, j] = T.if_then_else(index[bx * 8 + i] >= 0, table[T.max(index[bx * 8 + i], 0), j], T.float16(0))
            T.copy(tile, out[bx * 8, 0])

    return main


def scatter_add(T):
    """Rows added to the rows that an index names; indices repeat, so the additions are atomic."""
    tokens, width, table_rows = 16, 32, 8

    @T.prim_func
    def main(
        index: T.Tensor((tokens,), T.int64),
        rows: T.Tensor((tokens, width), T.float32),
        table: T.Tensor((table_rows, width), T.float32),
    ):
        with T.Kernel(tokens // 4, threads=32) as bx:
            for i, j in T.Parallel(4, width):
                T.atomic_add(table[index[bx * 4 + i], j], rows[bx * 4 + i, j])

    return main


def quantize_fp8(T):
    """Each row scaled to the range of e4m3 by its largest magnitude."""
    rows, cols = 32, 128

    @T.prim_func
    def main(
        A: T.Tensor((rows, cols), T.bfloat16),
        out: T.Tensor((rows, cols), T.float8_e4m3fn),
        scale: T.Tensor((rows,), T.float32),
    ):
        with T.Kernel(rows // 16, threads=64) as bx:
            tile = T.alloc_fragment((16, cols), T.float32)
            high = T.alloc_fragment((16,), T.float32)
            quantized = T.alloc_fragment((16, cols), T.float8_e4m3fn)
            T.copy(A[bx * 16, 0], tile)
            T.reduce_absmax(tile, high, dim=1)
            for i in T.Parallel(16):
                high[i] = T.max(high[i], 1e-4) / 448.0
            for i, j in T.Parallel(16, cols):
                quantized[i, j] = T.clamp(tile[i, j] / high[i], -448.0, 448.0)
            T.copy(quantized, out[bx * 16, 0])
            T.copy(high, scale[bx * 16])

    return main


def rotary(T):
    """Rotary position embedding with interleaved pairs; the angle table is computed in the kernel."""
    tokens, width = 32, 64

    @T.macro
    def angle(position, pair):
        return T.cast(position, T.float32) * T.exp2(T.cast(pair, T.float32) * (-8.0 / (width // 2)))

    @T.prim_func
    def main(A: T.Tensor((tokens, width), T.float16), out: T.Tensor((tokens, width), T.float16)):
        with T.Kernel(tokens // 16, threads=64) as bx:
            tile = T.alloc_shared((16, width), T.float16)
            turned = T.alloc_fragment((16, width // 2, 2), T.float32)
            T.copy(A[bx * 16, 0], tile)
            for i, j, part in T.Parallel(16, width // 2, 2):
                cosine = T.cos(angle(bx * 16 + i, j))
                sine = T.sin(angle(bx * 16 + i, j))
                partner = T.if_then_else(part == 0, -tile[i, 2 * j + 1], tile[i, 2 * j])
                turned[i, j, part] = tile[i, 2 * j + part] * cosine + partner * sine
            T.copy(T.reshape(turned, (16, width)), out[bx * 16, 0])

    return main


def guarded_window(T):
    """A sum over a window that reaches past both ends: out-of-range reads take an annotated safe value."""
    length = 100

    @T.prim_func
    def main(A: T.Tensor((length,), T.float32), out: T.Tensor((length,), T.float32)):
        with T.Kernel(T.ceildiv(length, 64), threads=64) as bx:
            T.annotate_safe_value({A: 1.0})
            acc = T.alloc_fragment((64,), T.float32)
            T.clear(acc)
            for shift in T.serial(5):
                for i in T.Parallel(64):
                    acc[i] += A[bx * 64 + i + shift - 2]
            T.copy(acc, out[bx * 64])

    return main


def _embedding_reference(args):
    index, table = args[0].long(), f64(args[1])
    return {2: torch.where(index[:, None] >= 0, table[index.clamp(min=0)], torch.zeros(1, dtype=torch.float64))}


def _quantize_reference(args):
    a = args[0].float()
    scale = a.abs().amax(1).clamp(min=1e-4) / 448.0
    return {1: f64((a / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)), 2: f64(scale)}


def _rotary_reference(args):
    x = f64(args[0])
    angles = torch.arange(32, dtype=torch.float64)[:, None] * 2.0 ** (-torch.arange(32, dtype=torch.float64) / 4)
    even, odd = x[:, 0::2], x[:, 1::2]
    turned = even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()
    return {1: torch.stack(turned, -1).reshape(32, 64)}


def _window_reference(args):
    padded = torch.nn.functional.pad(f64(args[0]), (2, 2), value=1.0)
    return {1: padded.unfold(0, 5, 1).sum(1)}


def _embedding_inputs(rng):
    return [randint(rng, -1, 40, 24), randn(rng, 40, 64), poison(24, 64, dtype=torch.float16)]


def _scatter_inputs(rng):
    index = randint(rng, 0, 8, 16, dtype=torch.int64)
    return [index, randn(rng, 16, 32, dtype=_F32), randn(rng, 8, 32, dtype=_F32)]


_F16, _F32 = torch.float16, torch.float32
_EXACT = {"rtol": 0.0, "atol": 0.0}

KERNELS = (
    PlainKernel(
        name="embedding",
        build=embedding,
        inputs=_embedding_inputs,
        reference=_embedding_reference,
        covers=("gather", "if_then_else"),
        **_EXACT,
    ),
    PlainKernel(
        name="scatter_add",
        build=scatter_add,
        inputs=_scatter_inputs,
        reference=lambda args: {2: f64(args[2]).index_add(0, args[0], f64(args[1]))},
        covers=("scatter", "atomic_add"),
        atol=1e-4,
    ),
    PlainKernel(
        name="quantize_fp8",
        build=quantize_fp8,
        inputs=lambda rng: [
            randn(rng, 32, 128, dtype=torch.bfloat16),
            poison(32, 128, dtype=torch.float8_e4m3fn),
            poison(32),
        ],
        reference=_quantize_reference,
        covers=("reduce_absmax", "clamp", "float8_e4m3fn"),
        rtol=1e-6,
        atol=1e-6,
    ),
    PlainKernel(
        name="rotary",
        build=rotary,
        inputs=lambda rng: [randn(rng, 32, 64), poison(32, 64, dtype=_F16)],
        reference=_rotary_reference,
        covers=("macro", "3-D parallel", "reshape", "sin", "cos"),
    ),
    PlainKernel(
        name="guarded_window",
        build=guarded_window,
        inputs=lambda rng: [randn(rng, 100, dtype=_F32), poison(100)],
        reference=_window_reference,
        covers=("annotate_safe_value", "out-of-range reads"),
        atol=1e-4,
    ),
)
