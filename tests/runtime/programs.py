# SPDX-License-Identifier: MIT
"""Small programs that the tests of the runtime call.

No postponed annotations here: TileLang evaluates those of a traced function where its closure is not known.
"""

from typing import Any

import tilescale
import tilescale.language as T


def total(devices: Any, n: int = 64, dtype: str = "float32"):
    """Y = sum of X over the devices, each of which has its own X and Y."""

    @T.prim_func
    def total_program(X: T.Tensor((n,), dtype), Y: T.Tensor((n,), dtype)):
        with T.Kernel(device=devices, block=1, threads=32):
            with T.Scale("block"):
                tile = T.alloc((n,), dtype, level="l1")
                T.copy(X, tile)
                T.copy(tile, Y)
            with T.Scale("device"):
                T.allreduce(Y)

    return total_program


def in_turn(devices: int):
    """Rank + 1 into `X`; then `Y`, which may be the same memory in another shape, into `Z`."""

    @T.prim_func
    def in_turn_program(X: T.Tensor((64,), "float32"), Y: T.Tensor((8, 8), "float32"), Z: T.Tensor((64,), "float32")):
        with T.Kernel(device=devices, block=1, threads=32):
            with T.Scale("device") as (rank, _):
                T.fill(X, T.cast(rank + 1, "float32"))
            with T.Scale("block"):
                for i in T.Parallel(64):
                    Z[i] = Y[i // 8, i % 8]

    return in_turn_program


def matmul(devices: int, M: int = 32, N: int = 32, K: int = 64):
    """C = A B with K split over the devices: the views say how."""

    @T.prim_func
    def matmul_program(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(device=devices, block=1, threads=128):
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullCol)
                B_dev = T.view(B, layout=T.FullRow)
                C_dev = T.view(C, layout=T.Replica)
            with T.Scale("block"):
                a = T.alloc((M, K // devices), "float32", level="l1")
                b = T.alloc((K // devices, N), "float32", level="l1")
                c = T.alloc((M, N), "float32", level="l0")
                T.copy(A_dev, a)
                T.copy(B_dev, b)
                T.clear(c)
                T.gemm(a, b, c)
                T.copy(c, C_dev)
            with T.Scale("device"):
                T.allreduce(C_dev)

    return matmul_program


def cyclic(devices: int, n: int = 64):
    """Doubles a vector whose elements go round the devices two by two."""

    @T.prim_func
    def cyclic_program(X: T.Tensor((n,), "float32")):
        with T.Kernel(device=devices, block=1, threads=32):
            with T.Scale("device"):
                mine = T.view(X, layout=T.Shard(0, block=2))
            with T.Scale("block"):
                for i in T.Parallel(n // devices):
                    mine[i] = mine[i] * 2

    return cyclic_program


def double(n: Any, dtype: str = "float32"):
    """Y = 2 X in plain TileLang."""

    @T.prim_func
    def double_program(X: T.Tensor((n,), dtype), Y: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            for i in T.Parallel(32):
                if b * 32 + i < n:
                    Y[b * 32 + i] = X[b * 32 + i] * 2

    return double_program


def grow(devices: int):
    """X += number of devices, of a length that the call determines."""
    n = T.dynamic("n")

    @T.prim_func
    def grow_program(X: T.Tensor((n,), "float32")):
        with T.Kernel(device=devices, block=T.ceildiv(n, 32), threads=32) as b:
            with T.Scale("device") as (_, size):
                T.barrier()
            with T.Scale("block"):
                for i in T.Parallel(32):
                    if b * 32 + i < n:
                        X[b * 32 + i] = X[b * 32 + i] + size

    return grow_program


def stuck(devices: int):
    """Waits for a flag that only half of the signals reach."""

    @T.prim_func
    def stuck_program(flags: T.Tensor((1,), "int32")):
        with T.Kernel(device=devices, block=1, threads=32):
            with T.Scale("block"):
                with T.Scale("device") as (rank, size):
                    T.signal(flags[0], dst=(rank + 1) % size)
                    T.wait(flags[0], ">=", 2)

    return stuck_program


def pointed(devices: int):
    """Clear the memory at an address."""

    @T.prim_func
    def pointed_program(table: T.Tensor((1,), "int64")):
        with T.Kernel(device=devices, block=1, threads=32):
            with T.Scale("block"):
                T.clear(T.make_tensor(table[0], (8,), "float32"))

    return pointed_program


@tilescale.jit(out_idx=-1)
def doubled(n: int, dtype: str = "float32"):
    """A factory in lazy style, whose kernels return Y."""
    return double(n, dtype)


@tilescale.jit
def scaled(X, factor: int = 3):
    """A kernel in eager style, which allocates what it returns."""
    n = T.dynamic("n")
    X: T.Tensor[[n], T.float32]
    Y = T.empty([n], "float32")
    with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
        for i in T.Parallel(32):
            if b * 32 + i < n:
                Y[b * 32 + i] = X[b * 32 + i] * factor
    return Y
