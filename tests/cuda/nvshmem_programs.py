# SPDX-License-Identifier: MIT
"""Programs that copy by NVSHMEM. The GPU check runs them too."""

from typing import Any

import tilescale.language as T

IMPL = "nvshmem"
BLOCKS, ROWS, COLUMNS = 4, 16, 64


def ring(dtype: str = "bfloat16", flag: str = "uint64", op: str = "add") -> Any:
    """Put each block's rows to the next device and raise a flag there; add 1 to the received rows; twice."""

    @T.prim_func
    def ring_of_puts(
        X: T.Tensor((BLOCKS * ROWS, COLUMNS), dtype),
        Y: T.Tensor((BLOCKS * ROWS, COLUMNS), dtype),
        Z: T.Tensor((BLOCKS * ROWS, COLUMNS), dtype),
        flags: T.Tensor((BLOCKS,), flag),
        turn: T.int32,
    ):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128) as bx:
            tile = T.alloc((ROWS, COLUMNS), dtype, level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * ROWS, 0], tile)
                value = 1 if op == "add" else turn
                T.copy(tile, Y[bx * ROWS, 0], dst=(rank + 1) % size, signal=flags[bx], value=value, op=op, impl=IMPL)
                T.wait(flags[bx], ">=", turn)
                T.copy(Y[bx * ROWS, 0], tile)
                for i, j in T.Parallel(ROWS, COLUMNS):
                    Z[bx * ROWS + i, j] = tile[i, j] + 1

    return ring_of_puts


def tails() -> Any:
    """Tiles of parts of rows that reach beyond the tensor, from registers, with a conversion in between."""

    @T.prim_func
    def tails_of_puts(
        X: T.Tensor((50, 100), "float32"), Y: T.Tensor((50, 100), "float16"), flags: T.Tensor((1,), "int32")
    ):
        with T.Kernel(device=T.ALL, block=(2, BLOCKS), threads=64) as (bx, by):
            tile = T.alloc_fragment((ROWS, COLUMNS), "float32")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[by * ROWS, bx * COLUMNS], tile)
                peer = (rank + size - 1) % size
                T.copy(tile, Y[by * ROWS, bx * COLUMNS], dst=peer, signal=flags[0], impl=IMPL)

    return tails_of_puts


def gets() -> Any:
    """Every block reads planes of the next device: inside, over the upper edge, and before the first row."""

    @T.prim_func
    def gets_of_planes(X: T.Tensor((3, 40, 96), "float32"), Y: T.Tensor((BLOCKS, 2, ROWS, 32), "float32")):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128) as bx:
            tile = T.alloc((2, ROWS, 32), "float32", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[1:3, bx * ROWS - 3 : bx * ROWS - 3 + ROWS, 64:96], tile, src=(rank + 1) % size, impl=IMPL)
                T.copy(tile, Y[bx, 0:2, 0:ROWS, 0:32])

    return gets_of_planes


def tensors() -> Any:
    """A device phase: whole tensors to the next device and from the one after it, then the flag."""

    @T.prim_func
    def whole_tensors(
        X: T.Tensor((64, 128), "float32"),
        Y: T.Tensor((64, 128), "float32"),
        Z: T.Tensor((64, 128), "float32"),
        flags: T.Tensor((1,), "int64"),
    ):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128):
            with T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size, signal=flags[0], impl=IMPL)
                T.barrier()
                T.copy(Y, Z, src=(rank + 1) % size, impl=IMPL)

    return whole_tensors


def rows_of_all(blocks: int, rows: int, columns: int) -> Any:
    """Every block puts rows straight from symmetric memory to the next device."""

    @T.prim_func
    def puts_of_rows(
        X: T.Tensor((blocks * rows, columns), "bfloat16"), Y: T.Tensor((blocks * rows, columns), "bfloat16")
    ):
        with T.Kernel(device=T.ALL, block=blocks, threads=512) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, size):
                begin = bx * rows
                T.copy(
                    X[begin : begin + rows, 0:columns],
                    Y[begin : begin + rows, 0:columns],
                    dst=(rank + 1) % size,
                    impl=IMPL,
                )

    return puts_of_rows


def without() -> Any:
    """The ring by plain stores."""

    @T.prim_func
    def ring_of_stores(
        X: T.Tensor((BLOCKS * ROWS, COLUMNS), "float32"), Y: T.Tensor((BLOCKS * ROWS, COLUMNS), "float32")
    ):
        with T.Kernel(device=T.ALL, block=BLOCKS, threads=128) as bx:
            tile = T.alloc((ROWS, COLUMNS), "float32", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X[bx * ROWS, 0], tile)
                T.copy(tile, Y[bx * ROWS, 0], dst=(rank + 1) % size, impl="lsu")

    return ring_of_stores
