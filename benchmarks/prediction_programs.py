# SPDX-License-Identifier: MIT
"""Programs whose simulated times `predictions.py` compares with measured ones. They are traced, not run."""

import importlib
import sys
from pathlib import Path
from typing import Any

import tilescale.language as T

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "distributed"

TILE = 32 << 10
"""Bytes of a tile that blocks copy."""


def product(m: int, n: int, k: int, tile: tuple[int, int, int], stages: int, threads: int):
    """C = A B in bfloat16, one block for each tile of C."""
    block_m, block_n, block_k = tile

    @T.prim_func
    def gemm(A: T.Tensor((m, k), "bfloat16"), B: T.Tensor((k, n), "bfloat16"), C: T.Tensor((m, n), "bfloat16")):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=threads) as (bx, by):
            a = T.alloc_shared((block_m, block_k), "bfloat16")
            b = T.alloc_shared((block_k, block_n), "bfloat16")
            c = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(c)
            for i in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(A[by * block_m, i * block_k], a)
                T.copy(B[i * block_k, bx * block_n], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block_m, bx * block_n])

    return gemm


def whole_copy(nbytes: int, devices: int):
    """Copy a tensor from every device to the next one, by the copy engine."""

    @T.prim_func
    def copy(X: T.Tensor((nbytes,), "uint8"), Y: T.Tensor((nbytes,), "uint8")):
        with T.Kernel(device=devices):
            with T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size, impl="copy_engine")

    return copy


def tile_puts(blocks: int, steps: int, impl: str, devices: int):
    """Send tiles of each device's tensor to the next device, by its blocks."""
    n = TILE // 2

    @T.prim_func
    def put(X: T.Tensor((blocks, steps, n), "bfloat16"), Y: T.Tensor((blocks, steps, n), "bfloat16")):
        with T.Kernel(device=devices, block=blocks, threads=512) as b:
            with T.Scale("block"):
                tile = T.alloc_shared((n,), "bfloat16")
                for i in T.Pipelined(steps, num_stages=3):
                    T.copy(X[b, i, 0], tile)
                    with T.Scale("device") as (rank, size):
                        T.copy(tile, Y[b, i, 0], dst=(rank + 1) % size, impl=impl)

    return put


def tile_gets(blocks: int, steps: int, impl: str, devices: int):
    """Fetch tiles of the next device's tensor, by blocks."""
    n = TILE // 2

    @T.prim_func
    def get(X: T.Tensor((blocks, steps, n), "bfloat16"), Y: T.Tensor((blocks, steps, n), "bfloat16")):
        with T.Kernel(device=devices, block=blocks, threads=512) as b:
            with T.Scale("block"):
                tile = T.alloc_shared((n,), "bfloat16")
                for i in T.Pipelined(steps, num_stages=3):
                    with T.Scale("device") as (rank, size):
                        T.copy(X[b, i, 0], tile, src=(rank + 1) % size, impl=impl)
                    T.copy(tile, Y[b, i, 0])

    return get


def data_and_flag(nbytes: int):
    """Send data and a flag between one block of each of two devices, and wait for the flag."""
    n = nbytes // 2

    @T.prim_func
    def program(X: T.Tensor((n,), "bfloat16"), Y: T.Tensor((n,), "bfloat16"), flag: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=512):
            with T.Scale("block"):
                tile = T.alloc_fragment((n,), "bfloat16")
                T.copy(X, tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y, dst=(rank + 1) % size, signal=flag[0], impl="lsu")
                T.wait(flag[0], ">=", 1)

    return program


def flag_alone():
    """Send a flag without data."""

    @T.prim_func
    def program(flag: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, block=1, threads=512):
            with T.Scale("block"):
                with T.Scale("device") as (rank, size):
                    T.signal(flag[0], dst=(rank + 1) % size)
                T.wait(flag[0], ">=", 1)

    return program


def allreduce(n: int, devices: int, impl: str):
    """All-reduce of `n` elements on each device."""

    @T.prim_func
    def program(X: T.Tensor((n,), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce(X, impl=impl)

    return program


def all_gather(n: int, devices: int, impl: str):
    """The collective, of `n` elements in all."""

    @T.prim_func
    def program(X: T.Tensor((n // devices,), "bfloat16"), Y: T.Tensor((n,), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.all_gather(X, Y, impl=impl)

    return program


def reduce_scatter(n: int, devices: int, impl: str):
    """The collective, of `n` elements on each device."""

    @T.prim_func
    def program(X: T.Tensor((n,), "bfloat16"), Y: T.Tensor((n // devices,), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.reduce_scatter(X, Y, impl=impl)

    return program


def gathered_product(m: int, n: int, k: int, devices: int, impl: str):
    """Gather the rows of all devices, then multiply them by the local `n` columns."""
    block_m, block_n, block_k = 128, 256, 64

    @T.prim_func
    def program(
        A: T.Tensor((m // devices, k), "bfloat16"), B: T.Tensor((k, n), "bfloat16"), C: T.Tensor((m, n), "bfloat16")
    ):
        with T.Kernel(device=devices, block=(T.ceildiv(n, block_n), m // block_m), threads=256) as (bx, by):
            whole = T.alloc((m, k), "bfloat16", level="l2")
            with T.Scale("device"):
                T.all_gather(A, whole, impl=impl)
            with T.Scale("block"):
                a = T.alloc_shared((block_m, block_k), "bfloat16")
                b = T.alloc_shared((block_k, block_n), "bfloat16")
                c = T.alloc_fragment((block_m, block_n), "float32")
                T.clear(c)
                for i in T.Pipelined(k // block_k, num_stages=4):
                    T.copy(whole[by * block_m, i * block_k], a)
                    T.copy(B[i * block_k, bx * block_n], b)
                    T.gemm(a, b, c)
                T.copy(c, C[by * block_m, bx * block_n])

    return program


def all_to_all(n: int, devices: int, impl: str):
    """The collective, of `n` elements on each device."""

    @T.prim_func
    def program(X: T.Tensor((n,), "bfloat16"), Y: T.Tensor((n,), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.all_to_all(X, Y, impl=impl)

    return program


COLLECTIVES = {
    "allreduce": allreduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


# -- fused kernels -----------------------------------------------------------------------------------------------------

BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4


def gather_and_multiply(m: int, n: int, k: int, devices: int, places: int, senders: int = 8):
    """All-gather + GEMM: `senders` blocks of each device send its rows of A, the others wait for the rows they need."""
    rows, workers = m // devices, places - senders
    tiles_m, tiles_n, tiles_k = rows // BLOCK_M, n // BLOCK_N, k // BLOCK_K
    parts = tiles_m * tiles_k

    @T.prim_func
    def ag_gemm(
        A: T.Tensor((rows, k), "bfloat16"),
        B: T.Tensor((k, n), "bfloat16"),
        C: T.Tensor((devices, rows, n), "bfloat16"),
        gathered: T.Tensor((devices, rows, k), "bfloat16"),
        arrived: T.Tensor((devices,), "int32"),
    ):
        with T.Kernel(device=devices, block=places, threads=256) as block:
            with T.Scale("block"):
                a = T.alloc((BLOCK_M, BLOCK_K), "bfloat16", level="l1")
                b = T.alloc((BLOCK_K, BLOCK_N), "bfloat16", level="l1")
                c = T.alloc((BLOCK_M, BLOCK_N), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    if block < senders:
                        for step in T.serial(size):
                            for iteration in T.serial(T.ceildiv(parts - block, senders)):
                                row = (block + iteration * senders) // tiles_k * BLOCK_M
                                col = (block + iteration * senders) % tiles_k * BLOCK_K
                                to = (rank + size - step) % size
                                T.copy(A[row, col], a)
                                T.copy(a, gathered[rank, row, col], dst=to, signal=arrived[rank])
                    else:
                        for iteration in T.serial(T.ceildiv(devices * tiles_m * tiles_n - (block - senders), workers)):
                            tile = block - senders + iteration * workers
                            shard = (rank + tile // (tiles_m * tiles_n)) % size
                            row, col = tile // tiles_n % tiles_m * BLOCK_M, tile % tiles_n * BLOCK_N
                            T.wait(arrived[shard], ">=", parts)
                            T.clear(c)
                            for i in T.Pipelined(tiles_k, num_stages=STAGES):
                                T.copy(gathered[shard, row, i * BLOCK_K], a)
                                T.copy(B[i * BLOCK_K, col], b)
                                T.gemm(a, b, c)
                            T.copy(c, C[shard, row, col])

    return ag_gemm


def multiply_and_scatter(m: int, n: int, k: int, devices: int):
    """GEMM + reduce-scatter: finished tiles go to their owners, which add up the parts at the end."""
    rows = m // devices
    tiles_m, tiles_n, tiles_k = rows // BLOCK_M, n // BLOCK_N, k // BLOCK_K
    half = BLOCK_N // 2

    @T.prim_func
    def gemm_rs(
        A: T.Tensor((devices, rows, k), "bfloat16"),
        B: T.Tensor((k, n), "bfloat16"),
        C: T.Tensor((rows, n), "bfloat16"),
        inbox: T.Tensor((devices, rows, n), "bfloat16"),
        arrived: T.Tensor((tiles_m, tiles_n), "int32"),
    ):
        with T.Kernel(device=devices, block=(tiles_n, tiles_m, devices), threads=256) as (bx, by, bz):
            with T.Scale("block"):
                a = T.alloc((BLOCK_M, BLOCK_K), "bfloat16", level="l1")
                b = T.alloc((BLOCK_K, BLOCK_N), "bfloat16", level="l1")
                c = T.alloc((BLOCK_M, BLOCK_N), "float32", level="l0")
                part = T.alloc((BLOCK_M, half), "bfloat16", level="l1")  # fills the shared memory, with four stages
                with T.Scale("device") as (rank, size):
                    owner = (rank + bz + 1) % size
                    T.clear(c)
                    for i in T.Pipelined(tiles_k, num_stages=STAGES):
                        T.copy(A[owner, by * BLOCK_M, i * BLOCK_K], a)
                        T.copy(B[i * BLOCK_K, bx * BLOCK_N], b)
                        T.gemm(a, b, c)
                    for h in T.serial(2):
                        col = bx * BLOCK_N + h * half
                        T.copy(c[0, h * half], part)
                        T.copy(part, inbox[rank, by * BLOCK_M, col], dst=owner, signal=arrived[by, bx])
            with T.Scale("device"):
                with T.Scale("block"):
                    total = T.alloc((BLOCK_M, BLOCK_N), "float32", level="l0")
                    one = T.alloc((BLOCK_M, BLOCK_N), "bfloat16", level="l0")
                    if bz == 0:
                        T.wait(arrived[by, bx], ">=", 2 * devices)
                        T.clear(total)
                        for r in T.serial(devices):
                            T.copy(inbox[r, by * BLOCK_M, bx * BLOCK_N], one)
                            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                                total[i, j] += one[i, j]
                        T.copy(total, C[by * BLOCK_M, bx * BLOCK_N])

    return gemm_rs


# -- examples ----------------------------------------------------------------------------------------------------------


def example(name: str, devices: int, sizes: list[int]) -> Any:
    """A program of an example, by the name of the function that returns it."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    file = {"tp_gemm": "08_tp_gemm", "cp_mla": "09_cp_flash_mla"}[name]
    return getattr(importlib.import_module(file), name)(devices, *sizes)
