# SPDX-License-Identifier: MIT
"""A kernel in eager style: the function body is the program and the shapes come from the arguments."""

import tilelang
import torch

from .base import PlainKernel, f64, poison, randn


def eager_scale(T):
    """out = factor * x, with an output that the kernel allocates itself as its last parameter."""

    @tilelang.jit(target={"kind": "cuda", "arch": "sm_80"})
    def scale(x, factor: float):
        rows, cols = T.const("rows, cols")
        x: T.Tensor[[rows, cols], T.float32]
        out = T.empty((rows, cols), T.float16)
        with T.Kernel(T.ceildiv(rows, 16), threads=64) as bx:
            tile = T.alloc_fragment((16, cols), T.float32)
            T.copy(x[bx * 16, 0], tile)
            for i, j in T.Parallel(16, cols):
                tile[i, j] = tile[i, j] * factor
            T.copy(tile, out[bx * 16, 0])
        return out

    return scale.get_tir(torch.empty(40, 64), factor=1.5)


KERNELS = (
    PlainKernel(
        name="eager_scale",
        build=eager_scale,
        inputs=lambda rng: [randn(rng, 40, 64, dtype=torch.float32), poison(40, 64, dtype=torch.float16)],
        reference=lambda args: {1: 1.5 * f64(args[0])},
        covers=("eager", "empty", "const"),
        rtol=1e-3,
        atol=1e-3,
    ),
)
