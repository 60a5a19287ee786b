# SPDX-License-Identifier: MIT
"""Data movement: transposes, layouts, views, slices, copy hints."""

import torch

from .base import PlainKernel, f64, poison, randn


def transpose_padded(T):
    """Copy through a shared tile with padded rows by an explicit layout, with an extent that is not a multiple."""
    rows, cols, block = 80, 48, 32

    @T.prim_func
    def main(A: T.Tensor((rows, cols), T.float32), out: T.Tensor((cols, rows), T.float32)):
        with T.Kernel(T.ceildiv(cols, block), T.ceildiv(rows, block), threads=64) as (bx, by):
            tile = T.alloc_shared((block, block), T.float32)
            T.annotate_layout({tile: T.Layout((block, block), lambda i, j: i * (block + 1) + j)})
            T.copy(A[by * block, bx * block], tile)
            for i, j in T.Parallel(block, block):
                if bx * block + i < cols and by * block + j < rows:
                    out[bx * block + i, by * block + j] = tile[j, i]

    return main


def transpose_swizzled(T):
    """The transpose tile operation between two shared tiles, one of them swizzled by hand."""
    rows, cols, block = 64, 128, 64

    @T.prim_func
    def main(A: T.Tensor((rows, cols), T.float16), out: T.Tensor((cols, rows), T.float16)):
        with T.Kernel(cols // block, threads=128) as bx:
            tile = T.alloc_shared((rows, block), T.float16)
            turned = T.alloc_shared((block, rows), T.float16)
            T.annotate_layout({tile: T.Layout((rows, block), lambda i, j: (i, (j // 8 ^ i % 8) * 8 + j % 8))})
            T.copy(A[0, bx * block], tile)
            T.transpose(tile, turned)
            T.copy(turned, out[bx * block, 0])

    return main


def slices(T):
    """Copies between slices of buffers of other rank, fills of parts of a tile, and a copy with a scalar index."""

    @T.prim_func
    def main(
        A: T.Tensor((4, 32, 64), T.float32),
        out: T.Tensor((3, 32, 64), T.float32),
        single: T.Tensor((1,), T.float32),
    ):
        with T.Kernel(1, threads=64):
            stages = T.alloc_shared((2, 32, 64), T.float32)
            tile = T.alloc_fragment((32, 64), T.float32)
            T.copy(A[1, :, :], stages[0, :, :])
            T.copy(A[3, :, :], stages[1, :, :])
            T.clear(stages[0, 8:16, :])
            T.fill(stages[1, 0:8, 16:32], 3.5)
            T.copy(stages[1, 0:16, :], out[0, 0:16, :])
            T.copy(stages[0, 0:16, :], out[0, 16:32, :])
            T.copy(stages[0, :, :], tile)
            for i, j in T.Parallel(32, 64):
                tile[i, j] = tile[i, j] + stages[1, 31 - i, 63 - j]
            T.copy(tile, out[1, :, :])
            T.fill(out[2, :, 0:32], -1)
            T.copy(A[0, :, 0:32], out[2, :, 32:64])
            T.copy(A[2, 5, 7], single[0])

    return main


def copy_hints(T):
    """The same copies with every hint that steers how they are done, which must not change what they do."""

    @T.prim_func
    def main(A: T.Tensor((64, 64), T.float16), out: T.Tensor((4, 32, 64), T.float16)):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((32, 64), T.float16)
            regs = T.alloc_fragment((32, 64), T.float16)
            T.copy(A[0, 0], tile, disable_tma=True)
            T.copy(tile, out[0, :, :], disable_tma=True)
            T.copy(A[32, 0], tile, prefer_instruction="cp_async")
            T.copy(tile, out[1, :, :], eviction_policy="evict_first")
            T.copy(A[16, 0], tile, prefer_instruction="sync")
            T.copy(tile, regs)
            T.copy(regs, out[2, :, :])
            for i, j in T.Parallel(32, 64, prefer_async=False):
                out[3, i, j] = A[63 - i, j]

    return main


def views(T):
    """reshape and view of global and shared buffers, a view with another element type among them."""

    @T.prim_func
    def main(A: T.Tensor((16, 64), T.float32), out: T.Tensor((2, 512), T.float32), bits: T.Tensor((16, 64), T.int32)):
        with T.Kernel(1, threads=64):
            flat = T.reshape(A, (1024,))
            tile = T.alloc_shared((8, 64), T.float32)
            row = T.view(tile, (512,))
            raw = T.view(tile, (8, 64), T.int32)
            T.copy(A[8:16, :], tile)
            for i in T.Parallel(512):
                out[0, i] = flat[i * 2]
            T.copy(row, out[1, :])
            T.copy(raw, bits[0:8, :])
            for i, j in T.Parallel(8, 64):
                bits[8 + i, j] = T.bitwise_xor(raw[i, j], 1)

    return main


def _slices_reference(args):
    a = f64(args[0])
    first, second = a[1].clone(), a[3].clone()
    first[8:16] = 0
    second[0:8, 16:32] = 3.5
    third = torch.cat([torch.full((32, 32), -1.0, dtype=torch.float64), a[0, :, 0:32]], 1)
    stacked = torch.stack([torch.cat([second[:16], first[:16]]), first + second.flip(0, 1), third])
    return {1: stacked, 2: a[2, 5, 7:8]}


def _views_reference(args):
    a = args[0]
    bits = a[8:].contiguous().view(torch.int32).to(torch.int64)
    return {1: f64(torch.stack([a.flatten()[::2], a[8:].flatten()])), 2: torch.cat([bits, bits ^ 1])}


_F16, _F32 = torch.float16, torch.float32
_EXACT = {"rtol": 0.0, "atol": 0.0}

KERNELS = (
    PlainKernel(
        name="transpose_padded",
        build=transpose_padded,
        inputs=lambda rng: [randn(rng, 80, 48, dtype=_F32), poison(48, 80)],
        reference=lambda args: {1: f64(args[0]).T},
        covers=("annotate_layout", "transpose", "tail tiles"),
        **_EXACT,
    ),
    PlainKernel(
        name="transpose_swizzled",
        build=transpose_swizzled,
        inputs=lambda rng: [randn(rng, 64, 128), poison(128, 64, dtype=_F16)],
        reference=lambda args: {1: f64(args[0]).T},
        covers=("annotate_layout", "transpose", "swizzle"),
        **_EXACT,
    ),
    PlainKernel(
        name="slices",
        build=slices,
        inputs=lambda rng: [randn(rng, 4, 32, 64, dtype=_F32), poison(3, 32, 64), poison(1)],
        reference=_slices_reference,
        covers=("copy", "fill", "clear", "slices", "scalar copy"),
        rtol=1e-6,
        atol=1e-6,
    ),
    PlainKernel(
        name="copy_hints",
        build=copy_hints,
        inputs=lambda rng: [randn(rng, 64, 64), poison(4, 32, 64, dtype=_F16)],
        reference=lambda args: {
            1: f64(torch.stack([args[0][:32], args[0][32:], args[0][16:48], args[0][32:].flip(0)])),
        },
        covers=("copy hints",),
        **_EXACT,
    ),
    PlainKernel(
        name="views",
        build=views,
        inputs=lambda rng: [
            randn(rng, 16, 64, dtype=_F32),
            poison(2, 512),
            poison(16, 64, dtype=torch.int32),
        ],
        reference=_views_reference,
        covers=("reshape", "view"),
        **_EXACT,
    ),
)
