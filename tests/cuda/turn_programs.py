# SPDX-License-Identifier: MIT
"""GEMMs with persistent grids, which combine each tile with those of the other devices, or count it."""

from collections.abc import Callable, Sequence
from typing import Any

import tilescale.language as T

DTYPE = "bfloat16"
TILE = (128, 256, 64)

Shape = tuple[int, int, int]


def sums(devices: int, shape: Shape, blocks: int, tile: Shape = TILE, level: str = "l1") -> Any:
    """C = the sum of A B^T over all devices, with tiles in a level of on-chip memory."""
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    across = n_all // bn
    tiles = m_all // bm * across
    threads = min(256, 2 * bm)

    @T.prim_func
    def summed(
        A: T.Tensor((m_all, k_all), DTYPE), B: T.Tensor((n_all, k_all), DTYPE), C: T.Tensor((m_all, n_all), DTYPE)
    ):
        with T.Kernel(device=devices, block=blocks, threads=threads) as block:
            with T.Scale("block"), T.Scale("device"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                out = T.alloc((bm, bn), DTYPE, level=level)
                for turn in T.serial(T.ceildiv(tiles - block, blocks)):
                    row, column = (block + turn * blocks) // across * bm, (block + turn * blocks) % across * bn
                    T.clear(c)
                    for k in T.Pipelined(k_all // bk, num_stages=2):
                        T.copy(A[row, k * bk], a)
                        T.copy(B[column, k * bk], b)
                        T.gemm(a, b, c, transpose_B=True)
                    T.copy(c, out)
                    T.allreduce(out)
                    T.copy(out, C[row, column])

    return summed


def parts(devices: int, shape: Shape, blocks: int, tile: Shape = TILE) -> Any:
    """Each device has its part of the rows of each tile of the sum; twice that is stored."""
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    across, high = n_all // bn, bm // devices
    tiles = m_all // bm * across
    threads = min(256, 2 * bm)

    @T.prim_func
    def scattered(
        A: T.Tensor((m_all, k_all), DTYPE),
        B: T.Tensor((n_all, k_all), DTYPE),
        C: T.Tensor((m_all // devices, n_all), DTYPE),
    ):
        with T.Kernel(device=devices, block=blocks, threads=threads) as block:
            with T.Scale("block"), T.Scale("device"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                out = T.alloc((bm, bn), DTYPE, level="l1")
                mine = T.alloc((high, bn), DTYPE, level="l1")
                for turn in T.serial(T.ceildiv(tiles - block, blocks)):
                    row, column = (block + turn * blocks) // across, (block + turn * blocks) % across * bn
                    T.clear(c)
                    for k in T.Pipelined(k_all // bk, num_stages=2):
                        T.copy(A[row * bm, k * bk], a)
                        T.copy(B[column, k * bk], b)
                        T.gemm(a, b, c, transpose_B=True)
                    T.copy(c, out)
                    T.reduce_scatter(out, mine)
                    for i, j in T.Parallel(high, bn):
                        mine[i, j] = mine[i, j] + mine[i, j]
                    T.copy(mine, C[row * high, column])

    return scattered


def sums_in_registers(devices: int, shape: Shape, blocks: int, tile: Shape = (128, 128, 64)) -> Any:
    """Like `sums`, with the summed tile in registers."""
    return sums(devices, shape, blocks, tile, "l0")


def sums_in_pairs(devices: int, shape: Shape, blocks: int, tile: Shape = (128, 128, 64)) -> Any:
    """Like `sums`, with one block for each tile, two of which are resident on an SM; `blocks` is their number."""
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    across = n_all // bn

    @T.prim_func
    def summed(
        A: T.Tensor((m_all, k_all), DTYPE), B: T.Tensor((n_all, k_all), DTYPE), C: T.Tensor((m_all, n_all), DTYPE)
    ):
        with T.Kernel(device=devices, block=blocks, threads=256) as block:
            with T.Scale("block"), T.Scale("device"):
                T.annotate_min_blocks_per_sm(2)
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                out = T.alloc((bm, bn), DTYPE, level="l1")
                row, column = block // across * bm, block % across * bn
                T.clear(c)
                for k in T.Pipelined(k_all // bk, num_stages=2):
                    T.copy(A[row, k * bk], a)
                    T.copy(B[column, k * bk], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, out)
                T.allreduce(out)
                T.copy(out, C[row, column])

    return summed


def counted(devices: int, shape: Shape, blocks: int, tile: Shape = TILE) -> Any:
    """C = A B^T of each device; even rows of tiles are counted, as for a sender."""
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    across = n_all // bn
    tiles = m_all // bm * across

    @T.prim_func
    def counted(
        A: T.Tensor((m_all, k_all), DTYPE), B: T.Tensor((n_all, k_all), DTYPE), C: T.Tensor((m_all, n_all), DTYPE)
    ):
        with T.Kernel(device=devices, block=blocks, threads=min(256, 2 * bm)) as block:
            done = T.alloc_flags((m_all // bm,))
            with T.Scale("block"), T.Scale("device"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                out = T.alloc((bm, bn), DTYPE, level="l1")
                for turn in T.serial(T.ceildiv(tiles - block, blocks)):
                    high, column = (block + turn * blocks) // across, (block + turn * blocks) % across * bn
                    T.clear(c)
                    for k in T.Pipelined(k_all // bk, num_stages=2):
                        T.copy(A[high * bm, k * bk], a)
                        T.copy(B[column, k * bk], b)
                        T.gemm(a, b, c, transpose_B=True)
                    T.copy(c, out)
                    T.copy(out, C[high * bm, column])
                    if high % 2 == 0:
                        T.signal(done[high])

    return counted


PROGRAMS: dict[str, Callable[..., Any]] = {
    "sums": sums,
    "sums in registers": sums_in_registers,
    "parts": parts,
    "sums in pairs": sums_in_pairs,
    "counted": counted,
}
"""Of a number of devices, the extents of A B^T, a number of blocks, and the extents of their tiles."""

TURNS = [
    ("sums", (1024, 2048, 256), 12),
    ("sums", (1024, 2048, 256), 64),
    ("sums", (512, 1024, 128), 17),
    ("sums in registers", (1024, 1024, 256), 12),
    ("parts", (1024, 2048, 256), 12),
    ("sums in pairs", (4096, 2048, 256), 512),
    ("counted", (1024, 2048, 256), 12),
]
"""Programs with shapes and blocks: whole and broken turns, one, none; blocks that share places."""


def rows_of_result(name: str, rows: int, devices: int) -> int:
    """Rows of C on each device."""
    return rows // devices if name == "parts" else rows


def expected(name: str, products: Sequence[Any], rank: int, high: int = TILE[0]) -> Any:
    """Expected C of a rank, from the results of all devices (arrays or tensors of float32), by tiles of a number of
    rows.
    """
    if name == "counted":
        return products[rank]
    total = sum(products[1:], products[0])
    if name != "parts":
        return total
    rows, columns = total.shape
    tiles = total.reshape(rows // high, len(products), high // len(products), columns)
    return 2 * tiles[:, rank].reshape(rows // len(products), columns)
