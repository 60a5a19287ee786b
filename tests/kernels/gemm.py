# SPDX-License-Identifier: MIT
"""Dense GEMMs: epilogue, operand layouts, warp policies, element types, tails, batches."""

import torch

from .base import PlainKernel, f64, poison, randint, randn


def gemm_relu(T):
    m, n, k, block_m, block_n, block_k = 128, 128, 128, 64, 64, 32

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), B: T.Tensor((k, n), T.float16), C: T.Tensor((m, n), T.float16)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (bx, by):
            a_tile = T.alloc_shared((block_m, block_k), T.float16)
            b_tile = T.alloc_shared((block_k, block_n), T.float16)
            acc = T.alloc_fragment((block_m, block_n), T.float32)
            T.use_swizzle(panel_size=2)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_k), num_stages=3):
                T.copy(A[by * block_m, ko * block_k], a_tile)
                T.copy(B[ko * block_k, bx * block_n], b_tile)
                T.gemm(a_tile, b_tile, acc)
            for i, j in T.Parallel(block_m, block_n):
                acc[i, j] = T.max(acc[i, j], 0)
            T.copy(acc, C[by * block_m, bx * block_n])

    return main


def gemm_layout(transpose_a: bool, transpose_b: bool, policy: str):
    """A one-tile-per-block GEMM whose first K step overwrites a poisoned accumulator (clear_accum)."""

    def build(T):
        m, n, k, block_m, block_n, block_k = 128, 64, 64, 64, 64, 32
        a_shape, b_shape = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))
        a_block = (block_k, block_m) if transpose_a else (block_m, block_k)
        b_block = (block_n, block_k) if transpose_b else (block_k, block_n)

        @T.prim_func
        def main(A: T.Tensor(a_shape, T.float16), B: T.Tensor(b_shape, T.float16), C: T.Tensor((m, n), T.float32)):
            with T.Kernel(T.ceildiv(m, block_m), threads=128) as by:
                a_tile = T.alloc_shared(a_block, T.float16)
                b_tile = T.alloc_shared(b_block, T.float16)
                acc = T.alloc_fragment((block_m, block_n), T.float32)
                T.fill(acc, 7)
                for ko in T.serial(T.ceildiv(k, block_k)):
                    if transpose_a:
                        T.copy(A[ko * block_k, by * block_m], a_tile)
                    else:
                        T.copy(A[by * block_m, ko * block_k], a_tile)
                    if transpose_b:
                        T.copy(B[0, ko * block_k], b_tile)
                    else:
                        T.copy(B[ko * block_k, 0], b_tile)
                    T.gemm(
                        a_tile,
                        b_tile,
                        acc,
                        transpose_A=transpose_a,
                        transpose_B=transpose_b,
                        policy=getattr(T.GemmWarpPolicy, policy),
                        clear_accum=(ko == 0),
                    )
                T.copy(acc, C[by * block_m, 0])

        return main

    return build


def gemm_dtype(in_dtype: str, accum_dtype: str, block_k: int):
    """C = A @ B.T for one input type; B is stored (n, k), which every tensor core accepts for every type."""

    def build(T):
        m, n, k, block_m, block_n = 64, 128, 128, 64, 64

        @T.prim_func
        def main(
            A: T.Tensor((m, k), in_dtype),
            B: T.Tensor((n, k), in_dtype),
            C: T.Tensor((m, n), accum_dtype),
        ):
            with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (bx, by):
                a_tile = T.alloc_shared((block_m, block_k), in_dtype)
                b_tile = T.alloc_shared((block_n, block_k), in_dtype)
                acc = T.alloc_fragment((block_m, block_n), accum_dtype)
                T.clear(acc)
                for ko in T.Pipelined(k // block_k, num_stages=2):
                    T.copy(A[by * block_m, ko * block_k], a_tile)
                    T.copy(B[bx * block_n, ko * block_k], b_tile)
                    T.gemm(a_tile, b_tile, acc, transpose_B=True)
                T.copy(acc, C[by * block_m, bx * block_n])

        return main

    return build


def gemm_tail(T):
    m, n, k, block_m, block_n, block_k = 100, 72, 88, 64, 64, 32

    @T.prim_func
    def main(A: T.Tensor((m, k), T.bfloat16), B: T.Tensor((k, n), T.bfloat16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (bx, by):
            a_tile = T.alloc_shared((block_m, block_k), T.bfloat16)
            b_tile = T.alloc_shared((block_k, block_n), T.bfloat16)
            acc = T.alloc_fragment((block_m, block_n), T.float32)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_k), num_stages=2):
                T.copy(A[by * block_m, ko * block_k], a_tile)
                T.copy(B[ko * block_k, bx * block_n], b_tile)
                T.gemm(a_tile, b_tile, acc)
            T.copy(acc, C[by * block_m, bx * block_n])

    return main


def batched_gemm_bias(T):
    batch, m, n, k, block_m, block_n, block_k = 2, 64, 64, 64, 64, 64, 32

    @T.prim_func
    def main(
        A: T.Tensor((batch, m, k), T.float16),
        B: T.Tensor((batch, k, n), T.float16),
        bias: T.Tensor((n,), T.float32),
        C: T.Tensor((batch, m, n), T.float32),
    ):
        with T.Kernel(n // block_n, m // block_m, batch, threads=128) as (bx, by, bz):
            a_tile = T.alloc_shared((block_m, block_k), T.float16)
            b_tile = T.alloc_shared((block_k, block_n), T.float16)
            acc = T.alloc_fragment((block_m, block_n), T.float32)
            for i, j in T.Parallel(block_m, block_n):
                acc[i, j] = bias[bx * block_n + j]
            for ko in T.Pipelined(k // block_k, num_stages=2):
                T.copy(A[bz, by * block_m, ko * block_k], a_tile)
                T.copy(B[bz, ko * block_k, bx * block_n], b_tile)
                T.gemm(a_tile, b_tile, acc)
            T.copy(acc, C[bz, by * block_m, bx * block_n])

    return main


def gemm_chain(T):
    """(A @ B) @ D with the intermediate kept in registers, as a register operand of the second GEMM."""
    m, hidden, n, k = 64, 64, 64, 64

    @T.prim_func
    def main(
        A: T.Tensor((m, k), T.float16),
        B: T.Tensor((k, hidden), T.float16),
        D: T.Tensor((hidden, n), T.float16),
        C: T.Tensor((m, n), T.float32),
    ):
        with T.Kernel(1, threads=128):
            a_tile = T.alloc_shared((m, k), T.float16)
            b_tile = T.alloc_shared((k, hidden), T.float16)
            d_tile = T.alloc_shared((hidden, n), T.float16)
            middle = T.alloc_fragment((m, hidden), T.float32)
            middle_half = T.alloc_fragment((m, hidden), T.float16)
            acc = T.alloc_fragment((m, n), T.float32)
            T.copy(A, a_tile)
            T.copy(B, b_tile)
            T.copy(D, d_tile)
            T.clear(middle)
            T.clear(acc)
            T.gemm(a_tile, b_tile, middle, policy=T.GemmWarpPolicy.FullRow)
            T.copy(middle, middle_half)
            T.gemm(middle_half, d_tile, acc, policy=T.GemmWarpPolicy.FullRow)
            T.copy(acc, C)

    return main


def _layout_kernel(transpose_a: bool, transpose_b: bool, policy: str) -> PlainKernel:
    m, n, k = 128, 64, 64
    a_shape, b_shape = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))

    def reference(args):
        a = f64(args[0]).T if transpose_a else f64(args[0])
        b = f64(args[1]).T if transpose_b else f64(args[1])
        return {2: a @ b}

    letters = ("t" if transpose_a else "n") + ("t" if transpose_b else "n")
    return PlainKernel(
        name=f"gemm_{letters}_{policy.lower()}",
        build=gemm_layout(transpose_a, transpose_b, policy),
        inputs=lambda rng: [randn(rng, *a_shape), randn(rng, *b_shape), poison(m, n)],
        reference=reference,
        covers=("gemm", "transpose_A" if transpose_a else "transpose_B", "policy", "clear_accum", "fill"),
    )


def _dtype_kernel(name: str, dtype: torch.dtype, in_dtype: str, block_k: int, **limits) -> PlainKernel:
    integer = not dtype.is_floating_point
    out = torch.int32 if integer else torch.float32

    def inputs(rng):
        shapes = (64, 128), (128, 128)
        pair = [randint(rng, -8, 8, *s, dtype=dtype) if integer else randn(rng, *s, dtype=dtype) for s in shapes]
        return [*pair, poison(64, 128, dtype=out)]

    def reference(args):
        product = f64(args[0]) @ f64(args[1]).T
        return {2: product.to(torch.int64) if integer else product}

    # TF32 rounds its inputs; Hopper accumulates 8-bit GEMMs with some 14 bits (DeepSeek-V3 technical report, section
    # 3.3.2).
    tolerance = 0.0 if integer else {torch.float32: 5e-2, torch.float8_e4m3fn: 1e-2}.get(dtype, 1e-3)
    return PlainKernel(
        name=name,
        build=gemm_dtype(in_dtype, "int32" if integer else "float32", block_k),
        inputs=inputs,
        reference=reference,
        covers=("gemm", in_dtype, "pipelined"),
        rtol=0.0 if integer else 1e-2,
        atol=tolerance,
        **limits,
    )


_FP8_LIMITS = {"targets": ("sm_90a", "sm_100a"), "why_not": {"sm_80": "no fp8 tensor core instruction"}}

KERNELS = (
    PlainKernel(
        name="gemm_relu",
        build=gemm_relu,
        inputs=lambda rng: [randn(rng, 128, 128), randn(rng, 128, 128), poison(128, 128, dtype=torch.float16)],
        reference=lambda args: {2: torch.relu(f64(args[0]) @ f64(args[1]))},
        covers=("gemm", "use_swizzle", "pipelined", "parallel"),
        atol=2e-2,
    ),
    _layout_kernel(False, False, "Square"),
    _layout_kernel(False, True, "FullRow"),
    _layout_kernel(True, False, "FullCol"),
    _layout_kernel(True, True, "Square"),
    _dtype_kernel("gemm_bf16", torch.bfloat16, "bfloat16", 32),
    _dtype_kernel("gemm_tf32", torch.float32, "float32", 32),
    _dtype_kernel("gemm_int8", torch.int8, "int8", 64),
    _dtype_kernel("gemm_fp8", torch.float8_e4m3fn, "float8_e4m3fn", 64, **_FP8_LIMITS),
    PlainKernel(
        name="gemm_tail",
        build=gemm_tail,
        inputs=lambda rng: [
            randn(rng, 100, 88, dtype=torch.bfloat16),
            randn(rng, 88, 72, dtype=torch.bfloat16),
            poison(100, 72),
        ],
        reference=lambda args: {2: f64(args[0]) @ f64(args[1])},
        covers=("gemm", "tail tiles", "pipelined"),
    ),
    PlainKernel(
        name="batched_gemm_bias",
        build=batched_gemm_bias,
        inputs=lambda rng: [
            randn(rng, 2, 64, 64),
            randn(rng, 2, 64, 64),
            randn(rng, 64, dtype=torch.float32),
            poison(2, 64, 64),
        ],
        reference=lambda args: {3: f64(args[0]) @ f64(args[1]) + f64(args[2])},
        covers=("gemm", "batched", "3-D grid"),
    ),
    PlainKernel(
        name="gemm_chain",
        build=gemm_chain,
        inputs=lambda rng: [randn(rng, 64, 64, scale=0.3) for _ in range(3)] + [poison(64, 64)],
        reference=lambda args: {3: f64(args[0]) @ f64(args[1]) @ f64(args[2])},
        covers=("gemm", "register operand"),
        atol=3e-2,
    ),
)
