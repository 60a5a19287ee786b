# SPDX-License-Identifier: MIT
"""Programs with parameters to be tuned."""

from typing import Any

import tilescale
import tilescale.language as T

CONFIGS = [{"block": block, "stages": stages} for block in (16, 64, 4096) for stages in (1, 3)]


def matrix_product(M: int, N: int, K: int, block: int, stages: int) -> Any:
    @T.prim_func
    def product(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "bfloat16")):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            a = T.alloc_shared((block, 32), "bfloat16")
            b = T.alloc_shared((32, block), "bfloat16")
            c = T.alloc_fragment((block, block), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=stages):
                T.copy(A[by * block, k * 32], a)
                T.copy(B[k * 32, bx * block], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block, bx * block])

    return product


@tilescale.autotune(configs=CONFIGS)
@tilescale.jit
def matmul(M: int, N: int, K: int, block: int = 32, stages: int = 2):
    return matrix_product(M, N, K, block, stages)


@tilescale.autotune(configs={"impl": ["one_shot", "two_shot", "star"], "devices": [4]})
@tilescale.jit
def total(n: int, impl: str = "one_shot", devices: int = 2):
    @T.prim_func
    def allreduce(X: T.Tensor((n,), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce(X, impl=impl)

    return allreduce


@tilescale.autotune(configs=lambda x, factor=2: [{"block": 32 * factor}, {"block": 256}])
@tilescale.jit
def scaled(x, factor: int = 2, block: int = 32):
    n = T.const("n")
    x: T.Tensor((n,), "float32")
    y = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, block), threads=32) as b:
        for i in T.Parallel(block):
            y[b * block + i] = x[b * block + i] * factor
    return y


@tilescale.autotune(
    configs={"rows": [128, 256], "__roles__": [{"carrier": "queue"}, {"carrier": "tiles"}, {"overlapped": True}]}
)
@tilescale.jit
def scattered(M: int, N: int, K: int, rows: int = 128):
    """A GEMM of 4 devices' columns; the rows of its sum are split over them."""

    @T.prim_func
    def product(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((M // 4, N), "bfloat16"),
    ):
        with T.Kernel(device=4, block=(N // 128, M // rows), threads=256) as (bx, by):
            P = T.alloc((M, N), "bfloat16", level="l2")
            with T.Scale("block"):
                a, b = T.alloc((rows, 64), "bfloat16", level="l1"), T.alloc((64, 128), "bfloat16", level="l1")
                c = T.alloc((rows, 128), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(K // 64, num_stages=3):
                    T.copy(A[by * rows, k * 64], a)
                    T.copy(B[k * 64, bx * 128], b)
                    T.gemm(a, b, c)
                T.copy(c, P[by * rows, bx * 128])
            with T.Scale("device"):
                T.reduce_scatter(P, C)

    return product
