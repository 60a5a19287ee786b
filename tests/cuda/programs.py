# SPDX-License-Identifier: MIT
"""Small programs between devices, one for each thing that the CUDA back end generates text for."""

from typing import Any

import tilescale.language as T

TILE, COLUMNS = 16, 64


def put_with_signal(dtype: str = "float32", impl: str | None = None) -> Any:
    """Every block puts its tile into the next device's memory, raises a flag there, and waits for its own."""

    @T.prim_func
    def put(X: T.Tensor((64, COLUMNS), dtype), Y: T.Tensor((64, COLUMNS), dtype), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=4, block=4, threads=128) as bx:
            tile = T.alloc((TILE, COLUMNS), dtype, level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * TILE, 0], tile)
                T.copy(tile, Y[bx * TILE, 0], dst=(rank + 1) % size, signal=flags[bx], impl=impl)
                T.wait(flags[bx], ">=", 1)

    return put


def put_with_own_flags(waits: bool = True, blocks: int = 4) -> Any:
    """The same with flags of the program, which are waited for only if `waits`."""

    @T.prim_func
    def put_own(X: T.Tensor((TILE * blocks, COLUMNS), "float32"), Y: T.Tensor((TILE * blocks, COLUMNS), "float32")):
        with T.Kernel(device=2, block=blocks, threads=128) as bx:
            arrived = T.alloc_flags((blocks, 2), "int64")
            tile = T.alloc((TILE, COLUMNS), "float32", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * TILE, 0], tile)
                T.copy(tile, Y[bx * TILE, 0], dst=(rank + 1) % size, signal=arrived[bx, rank], impl="lsu")
                if waits:
                    T.wait(arrived[bx, (rank + 1) % size], ">=", 1)

    return put_own


def barrier() -> Any:
    """A barrier of the blocks of the same number."""

    @T.prim_func
    def barrier_of_devices(X: T.Tensor((4,), "int32")):
        with T.Kernel(device=4, block=4, threads=64) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.barrier()
                X[bx] = rank

    return barrier_of_devices


def sum_of_tiles() -> Any:
    """An all-reduce of tiles in shared memory."""

    @T.prim_func
    def tiles(X: T.Tensor((64, COLUMNS), "bfloat16")):
        with T.Kernel(device=4, block=4, threads=128) as bx:
            tile = T.alloc((TILE, COLUMNS), "bfloat16", level="l1")
            with T.Scale("block"), T.Scale("device"):
                T.copy(X[bx * TILE, 0], tile)
                T.allreduce(tile)
                T.copy(tile, X[bx * TILE, 0])

    return tiles


def merge(a: Any, b: Any) -> Any:
    """Two partial results with the logarithms of their weights."""
    top = T.max(a[1], b[1])
    left, right = T.exp(a[1] - top), T.exp(b[1] - top)
    return (a[0] * left + b[0] * right) / (left + right), top + T.log(left + right)


def merged_tensors(impl: str | None = None, rows: int = 64, devices: int = 4) -> Any:
    """An all-reduce of two whole tensors with a combination of the user's."""

    @T.prim_func
    def merged(X: T.Tensor((rows, COLUMNS), "float32"), logsum: T.Tensor((rows,), "float32")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce(X, logsum, fn=merge, impl=impl)

    return merged


def whole_copy(impl: str | None = None, rows: int = 64) -> Any:
    """Put each device's whole tensor into the next one's and signal it."""

    @T.prim_func
    def whole(
        X: T.Tensor((rows, COLUMNS), "float32"), Y: T.Tensor((rows, COLUMNS), "float32"), flag: T.Tensor((1,), "int32")
    ):
        with T.Kernel(device=4):
            with T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size, signal=flag[0], impl=impl)
                T.wait(flag[0], ">=", 1)

    return whole


def steps() -> Any:
    """A device phase of all kinds of statements: loops, scalars, elements, flags, collectives."""

    @T.prim_func
    def mixed(X: T.Tensor((96, COLUMNS), "float32"), top: T.Tensor((1,), "float32"), flags: T.Tensor((2,), "int32")):
        with T.Kernel(device=4, block=6, threads=64) as bx:
            with T.Scale("device") as (rank, size):
                right = (rank + 1) % size
                T.clear(flags)
                T.barrier()
                for step in T.serial(3):
                    T.signal(flags[0], dst=right)
                    T.wait(flags[0], ">=", step + 1)
                    top[0] = 0
                    for i in T.serial(96):
                        top[0] = T.max(top[0], X[i, 0])
                    T.allreduce(top, op="max", impl="nccl")
                    for i, j in T.Parallel(96, COLUMNS):
                        X[i, j] = X[i, j] / top[0]
                if rank == 0:
                    T.signal(flags[1], dst=2)
            with T.Scale("block"):
                tile = T.alloc((TILE, COLUMNS), "float32", level="l1")
                with T.Scale("device"):
                    T.copy(X[bx * TILE, 0], tile)
                    T.copy(tile, X[bx * TILE, 0], dst=right)

    return mixed
