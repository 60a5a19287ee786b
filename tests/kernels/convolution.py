# SPDX-License-Identifier: MIT
"""Convolutions: as a GEMM over gathered patches (im2col), and directly."""

import torch
from torch.nn import functional

from .base import PlainKernel, f64, poison, randn


def im2col_convolution(images: int, stride: int, dilation: int, pad: int, gather: str, stages: int):
    """NHWC image, (kernel, kernel, channels, filters) weights, output flattened to (pixels, filters)."""

    def build(T):
        size, channels, filters, kernel = 8, 32, 64, 3
        out_size = (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        pixels, depth = images * out_size * out_size, kernel * kernel * channels
        block_m, block_k = 64, 32

        @T.prim_func
        def main(
            image: T.Tensor((images, size, size, channels), T.float16),
            weight: T.Tensor((depth, filters), T.float16),
            out: T.Tensor((pixels, filters), T.float32),
        ):
            with T.Kernel(T.ceildiv(pixels, block_m), threads=128) as bx:
                patch = T.alloc_shared((block_m, block_k), T.float16)
                weight_tile = T.alloc_shared((block_k, filters), T.float16)
                acc = T.alloc_fragment((block_m, filters), T.float32)
                T.clear(acc)
                for ko in T.Pipelined(depth // block_k, num_stages=stages):
                    getattr(T, gather)(image, patch, bx, ko, kernel, stride, dilation, pad)
                    T.copy(weight[ko * block_k, 0], weight_tile)
                    T.gemm(patch, weight_tile, acc)
                T.copy(acc, out[bx * block_m, 0])

        return main

    return build


def depthwise_convolution(T):
    """Causal, one filter of four taps a channel, with a bias and a SiLU."""
    length, channels, taps, block = 48, 64, 4, 16

    @T.prim_func
    def main(
        x: T.Tensor((length, channels), T.float16),
        weight: T.Tensor((taps, channels), T.float16),
        bias: T.Tensor((channels,), T.float32),
        out: T.Tensor((length, channels), T.float16),
    ):
        with T.Kernel(length // block, threads=64) as bx:
            acc = T.alloc_fragment((block, channels), T.float32)
            for i, j in T.Parallel(block, channels):
                acc[i, j] = bias[j]
            for tap in T.unroll(taps):
                for i, j in T.Parallel(block, channels):
                    position = bx * block + i + tap - (taps - 1)
                    if position >= 0:
                        acc[i, j] += T.cast(x[position, j], T.float32) * T.cast(weight[tap, j], T.float32)
            for i, j in T.Parallel(block, channels):
                acc[i, j] = acc[i, j] * T.sigmoid(acc[i, j])
            T.copy(acc, out[bx * block, 0])

    return main


def _im2col_kernel(
    name: str, images: int, stride: int, dilation: int, pad: int, gather: str, stages: int
) -> PlainKernel:
    pixels = images * ((8 + 2 * pad - 2 * dilation - 1) // stride + 1) ** 2

    def reference(args):
        weight = f64(args[1]).reshape(3, 3, 32, 64).permute(3, 2, 0, 1)
        image = f64(args[0]).permute(0, 3, 1, 2)
        planes = functional.conv2d(image, weight, stride=stride, dilation=dilation, padding=pad)
        return {2: planes.permute(0, 2, 3, 1).reshape(pixels, 64)}

    return PlainKernel(
        name=name,
        build=im2col_convolution(images, stride, dilation, pad, gather, stages),
        inputs=lambda rng: [randn(rng, images, 8, 8, 32), randn(rng, 288, 64, scale=0.2), poison(pixels, 64)],
        reference=reference,
        covers=(gather, "gemm", "convolution"),
    )


def _depthwise_reference(args):
    padded = functional.pad(f64(args[0]), (0, 0, 3, 0))
    return {3: functional.silu(f64(args[2]) + sum(padded[t : t + 48] * f64(args[1][t]) for t in range(4)))}


KERNELS = (
    _im2col_kernel("convolution_same", 2, 1, 1, 1, "im2col", stages=2),
    _im2col_kernel("convolution_strided", 4, 2, 1, 1, "im2col", stages=1),
    _im2col_kernel("convolution_dilated", 2, 1, 2, 2, "c2d_im2col", stages=0),
    PlainKernel(
        name="depthwise_convolution",
        build=depthwise_convolution,
        inputs=lambda rng: [
            randn(rng, 48, 64),
            randn(rng, 4, 64),
            randn(rng, 64, dtype=torch.float32),
            poison(48, 64, dtype=torch.float16),
        ],
        reference=_depthwise_reference,
        covers=("convolution", "guarded reads", "sigmoid", "unroll"),
    ),
)
