# SPDX-License-Identifier: MIT
"""The raced programs, in the language, with large tiles and bfloat16 results.

Operands are (rows, K), the right one transposed, as cuBLAS likes them. Every size is a whole number of tiles.
"""

from dataclasses import dataclass
from typing import Any

import tilescale.language as T

THREADS = 256
GROUP = 8
"""Rows of tiles of a rasterization group: the operands of a wave then fit into the L2 cache."""
PIECE = 256
"""Columns of a block's send, at most."""


@dataclass(frozen=True)
class Tiling:
    """A block's tile of C (m, n), a step's depth k, and loads in flight."""

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4


def raster(number: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Row and column of tiles by a tile's number: down the rows first, inside groups of a few rows."""
    group = min(GROUP, rows)
    while rows % group:
        group -= 1
    inside = number % (group * columns)
    return number // (group * columns) * group + inside % group, inside // group


@T.macro
def multiply(A, part, m, B, n, a, b, c, depth, step, stages):
    """Compute c = A[part, m:, :] B[n:, :]^T for one tile, in `depth` steps of `step` columns; a, b and c are the
    block's tiles.
    """
    T.clear(c)
    for k in T.Pipelined(depth, num_stages=stages):
        T.copy(A[part, m, k * step], a)
        T.copy(B[n, k * step], b)
        # A warpgroup has whole rows: instructions of 256 columns read less shared memory per multiplication than two of
        # 128.
        T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def multiply_by_warpgroups(A, part, m, B, n, a, b, c, depth, step, stages):
    """The same, with separate code for each warpgroup: its share of the rows."""
    with T.Scale("warpgroup"):
        T.clear(T.view(c, layout=T.FullRow))
    for k in T.Pipelined(depth, num_stages=stages):
        T.copy(A[part, m, k * step], a)
        T.copy(B[n, k * step], b)
        with T.Scale("warpgroup"):
            rows, share = T.view(a, layout=T.FullRow), T.view(c, layout=T.FullRow)
            T.gemm(rows, b, share, transpose_B=True)


def gemm(M: int, N: int, K: int, t: Tiling):
    """C = A B^T on one device: the baseline of all others."""
    tiles = M // t.m * (N // t.n)

    @T.prim_func
    def plain_gemm(
        A: T.Tensor((1, M, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((1, M, N), "bfloat16")
    ):
        with T.Kernel(tiles, threads=THREADS) as tile:
            a = T.alloc_shared((t.m, t.k), "bfloat16")
            b = T.alloc_shared((t.n, t.k), "bfloat16")
            c = T.alloc_fragment((t.m, t.n), "float32")
            out = T.alloc_shared((t.m, t.n), "bfloat16")
            row, column = raster(tile, M // t.m, N // t.n)
            multiply(A, 0, row * t.m, B, column * t.n, a, b, c, K // t.k, t.k, t.stages)
            T.copy(c, out)
            T.copy(out, C[0, row * t.m, column * t.n])

    return plain_gemm


# -- all-gather and GEMM -----------------------------------------------------------------------------------------------


def ag_gemm_phases(devices: int, M: int, N: int, K: int, t: Tiling):
    """Gather, then multiply."""
    rows = M // devices
    tiles_m, tiles_n = rows // t.m, N // t.n

    @T.prim_func
    def ag_then_gemm(
        A: T.Tensor((devices, rows, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((devices, rows, N), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=devices * tiles_m * tiles_n, threads=THREADS) as tile:
            gathered = T.alloc((devices, rows, K), "bfloat16", level="l2")
            with T.Scale("device"):
                T.all_gather(T.view(A, layout=T.FullRow), gathered, dim=0)
            with T.Scale("block"):
                a = T.alloc((t.m, t.k), "bfloat16", level="l1")
                b = T.alloc((t.n, t.k), "bfloat16", level="l1")
                c = T.alloc((t.m, t.n), "float32", level="l0")
                out = T.alloc((t.m, t.n), "bfloat16", level="l1")
                shard = tile // (tiles_m * tiles_n)
                row, column = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n)
                multiply(gathered, shard, row * t.m, B, column * t.n, a, b, c, K // t.k, t.k, t.stages)
                T.copy(c, out)
                T.copy(out, C[shard, row * t.m, column * t.n])

    return ag_then_gemm


def ag_gemm_queue(
    devices: int, M: int, N: int, K: int, t: Tiling, chunk: int, blocks: int = 0, product: Any = multiply
):
    """The device's copy queue gathers in place, in chunks of rows; each tile waits for the chunk that it reads.

    Args:
        blocks: of a persistent grid, which overlaps stores with the next GEMM; 0 for one block for each tile.
        product: `multiply`, or `multiply_by_warpgroups`.
    """
    rows = M // devices
    tiles_m, tiles_n = rows // t.m, N // t.n
    tiles = devices * tiles_m * tiles_n
    blocks = blocks or tiles

    @T.prim_func
    def ag_gemm_overlapped(
        A: T.Tensor((devices, rows, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((devices, rows, N), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=THREADS) as block:
            arrived = T.alloc_flags((devices, rows // chunk))
            with T.Scale("device") as (rank, size):
                T.all_gather(A[rank, :, :], A, dim=0, signal=arrived, chunk=chunk)
            with T.Scale("block"):
                a = T.alloc((t.m, t.k), "bfloat16", level="l1")
                b = T.alloc((t.n, t.k), "bfloat16", level="l1")
                c = T.alloc((t.m, t.n), "float32", level="l0")
                out = T.alloc((t.m, t.n), "bfloat16", level="l1")
                with T.Scale("device") as (rank, size):
                    for iteration in T.serial(T.ceildiv(tiles - block, blocks) if blocks < tiles else 1):
                        tile = block + iteration * blocks
                        # The local shard first, then that of the previous device, which sends here first, and so on.
                        shard = (rank + size - tile // (tiles_m * tiles_n)) % size
                        row, column = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n)
                        T.wait(arrived[shard, row * t.m // chunk], ">=", 1)
                        product(A, shard, row * t.m, B, column * t.n, a, b, c, K // t.k, t.k, t.stages)
                        T.copy(c, out)
                        T.copy(out, C[shard, row * t.m, column * t.n])

    return ag_gemm_overlapped


def ag_gemm_senders(devices: int, M: int, N: int, K: int, t: Tiling, chunk: int, senders: int):
    """The first blocks send the local shard to all peers, each other one computes a tile, waiting for a chunk of rows.

    Args:
        senders: how many blocks send; where one has ended, its SM runs a tile.
    """
    rows = M // devices
    tiles_m, tiles_n = rows // t.m, N // t.n
    wide = min(PIECE, K)
    across = K // wide
    pieces = tiles_m * across

    @T.prim_func
    def ag_gemm_by_senders(
        A: T.Tensor((devices, rows, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((devices, rows, N), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=senders + devices * tiles_m * tiles_n, threads=THREADS) as block:
            arrived = T.alloc_flags((devices, rows // chunk))
            with T.Scale("block"):
                a = T.alloc((t.m, t.k), "bfloat16", level="l1")
                b = T.alloc((t.n, t.k), "bfloat16", level="l1")
                c = T.alloc((t.m, t.n), "float32", level="l0")
                out = T.alloc((t.m, t.n), "bfloat16", level="l1")
                sent = T.alloc((t.m, wide), "bfloat16", level="l1")
                with T.Scale("device") as (rank, size):
                    if block < senders:
                        for iteration in T.serial(T.ceildiv(pieces - block, senders)):
                            piece = block + iteration * senders
                            m, k = piece // across * t.m, piece % across * wide
                            T.copy(A[rank, m, k], sent)
                            for step in T.serial(1, size):
                                peer = (rank + step) % size
                                T.copy(sent, A[rank, m, k], dst=peer, signal=arrived[rank, m // chunk])
                    else:
                        tile = block - senders
                        shard = (rank + size - tile // (tiles_m * tiles_n)) % size
                        row, column = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n)
                        if shard != rank:
                            T.wait(arrived[shard, row * t.m // chunk], ">=", chunk // t.m * across)
                        multiply(A, shard, row * t.m, B, column * t.n, a, b, c, K // t.k, t.k, t.stages)
                        T.copy(c, out)
                        T.copy(out, C[shard, row * t.m, column * t.n])

    return ag_gemm_by_senders


# -- GEMM and reduce-scatter -------------------------------------------------------------------------------------------


@T.macro
def add(total, part):
    """total += part, in float32."""
    for i, j in T.Parallel(total.shape[0], total.shape[1]):
        total[i, j] += part[i, j]


def gemm_rs_queue(devices: int, M: int, N: int, K: int, t: Tiling, chunk: int, blocks: int = 0):
    """Send finished rows of others by the copy queue, chunk by chunk; local rows come last, with the arrived parts.

    `blocks`: of a persistent grid; 0 for one block for each tile.
    """
    rows = M // devices
    tiles_m, tiles_n = rows // t.m, N // t.n
    chunks, full, tiles = rows // chunk, chunk // t.m * tiles_n, devices * tiles_m * tiles_n
    blocks = blocks or tiles

    @T.prim_func
    def gemm_rs_overlapped(
        A: T.Tensor((devices, rows, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((rows, N), "bfloat16")
    ):
        with T.Kernel(device=devices, block=blocks, threads=THREADS) as block:
            parts = T.alloc((devices, rows, N), "bfloat16", level="l2")
            inbox = T.alloc((devices, rows, N), "bfloat16", level="l2")
            done = T.alloc_flags((devices, chunks))
            arrived = T.alloc_flags((devices, chunks))
            with T.Scale("device") as (rank, size):
                for step in T.serial(1, size):
                    owner = (rank + step) % size
                    for i in T.serial(chunks):
                        T.copy(
                            parts[owner, i * chunk : (i + 1) * chunk, :],
                            inbox[rank, i * chunk : (i + 1) * chunk, :],
                            dst=owner,
                            signal=arrived[rank, i],
                            after=(done[owner, i], ">=", full),
                        )
            with T.Scale("block"):
                a = T.alloc((t.m, t.k), "bfloat16", level="l1")
                b = T.alloc((t.n, t.k), "bfloat16", level="l1")
                c = T.alloc((t.m, t.n), "float32", level="l0")
                out = T.alloc((t.m, t.n), "bfloat16", level="l1")
                with T.Scale("device") as (rank, size):
                    for iteration in T.serial(T.ceildiv(tiles - block, blocks)):
                        tile = block + iteration * blocks
                        owner = (rank + 1 + tile // (tiles_m * tiles_n)) % size  # others' rows first
                        row, column = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n)
                        m, n = row * t.m, column * t.n
                        multiply(A, owner, m, B, n, a, b, c, K // t.k, t.k, t.stages)
                        if owner != rank:
                            T.copy(c, out)
                            T.copy(out, parts[owner, m, n])
                            T.signal(done[owner, m // chunk])
                        else:
                            for step in T.serial(1, size):
                                source = (rank + step) % size
                                T.wait(arrived[source, m // chunk], ">=", 1)
                                T.copy(inbox[source, m, n], out)
                                add(c, out)
                            T.copy(c, out)
                            T.copy(out, C[m, n])

    return gemm_rs_overlapped


def gemm_rs_direct(devices: int, M: int, N: int, K: int, t: Tiling, blocks: int):
    """Send a finished tile of others' rows directly to its owner; local rows come last, with the arrived parts."""
    rows = M // devices
    tiles_m, tiles_n = rows // t.m, N // t.n
    tiles = devices * tiles_m * tiles_n

    @T.prim_func
    def gemm_rs_by_tiles(
        A: T.Tensor((devices, rows, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((rows, N), "bfloat16")
    ):
        with T.Kernel(device=devices, block=blocks, threads=THREADS) as block:
            inbox = T.alloc((devices, rows, N), "bfloat16", level="l2")
            arrived = T.alloc_flags((devices, tiles_m, tiles_n))
            with T.Scale("block"):
                a = T.alloc((t.m, t.k), "bfloat16", level="l1")
                b = T.alloc((t.n, t.k), "bfloat16", level="l1")
                c = T.alloc((t.m, t.n), "float32", level="l0")
                out = T.alloc((t.m, t.n), "bfloat16", level="l1")
                with T.Scale("device") as (rank, size):
                    for iteration in T.serial(T.ceildiv(tiles - block, blocks)):
                        tile = block + iteration * blocks
                        owner = (rank + 1 + tile // (tiles_m * tiles_n)) % size
                        row, column = raster(tile % (tiles_m * tiles_n), tiles_m, tiles_n)
                        m, n = row * t.m, column * t.n
                        multiply(A, owner, m, B, n, a, b, c, K // t.k, t.k, t.stages)
                        if owner != rank:
                            T.copy(c, out)
                            T.copy(out, inbox[rank, m, n], dst=owner, signal=arrived[rank, row, column])
                        else:
                            for step in T.serial(1, size):
                                source = (rank + step) % size
                                T.wait(arrived[source, row, column], ">=", 1)
                                T.copy(inbox[source, m, n], out)
                                add(c, out)
                            T.copy(c, out)
                            T.copy(out, C[m, n])

    return gemm_rs_by_tiles


# -- transfers and calls -----------------------------------------------------------------------------------------------


def put(devices: int, rows: int, columns: int, blocks: int, impl: str, tile: tuple[int, int] = (128, 256)):
    """Copy X of every device into the Y of the next one, tile by tile."""
    high, wide = tile
    across = columns // wide
    tiles = rows // high * across

    @T.prim_func
    def put_tiles(X: T.Tensor((rows, columns), "bfloat16"), Y: T.Tensor((rows, columns), "bfloat16")):
        with T.Kernel(device=devices, block=blocks, threads=THREADS) as block:
            with T.Scale("block"):
                x = T.alloc((high, wide), "bfloat16", level="l1")
                with T.Scale("device") as (rank, size):
                    for iteration in T.serial(T.ceildiv(tiles - block, blocks)):
                        number = block + iteration * blocks
                        m, n = number // across * high, number % across * wide
                        T.copy(X[m, n], x)
                        T.copy(x, Y[m, n], dst=(rank + 1) % size, impl=impl)

    return put_tiles


def put_and_wait(devices: int, blocks: int, high: int, wide: int):
    """Put a tile of each block to the next device, and wait for that of the previous one."""

    @T.prim_func
    def put_small(X: T.Tensor((blocks, high, wide), "float32"), Y: T.Tensor((blocks, high, wide), "float32")):
        with T.Kernel(device=devices, block=blocks, threads=128) as block:
            arrived = T.alloc_flags((blocks,))
            with T.Scale("block"):
                x = T.alloc((high, wide), "float32", level="l1")
                T.copy(X[block, 0, 0], x)
                with T.Scale("device") as (rank, size):
                    T.copy(x, Y[block, 0, 0], dst=(rank + 1) % size, signal=arrived[block])
                    T.wait(arrived[block], ">=", 1)

    return put_small


def allreduce(devices: int, elements: int):
    """Sum of a tensor over all devices."""

    @T.prim_func
    def allreduce_tensor(X: T.Tensor((elements,), "float32")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce(X)

    return allreduce_tensor


def collective(name: str, source: int, target: int, impl: str | None):
    """Collective of whole bfloat16 tensors, of X alone or from X to Y, on all devices of the job."""

    @T.prim_func
    def whole_tensors(X: T.Tensor((source,), "bfloat16"), Y: T.Tensor((target,), "bfloat16")):
        with T.Kernel(device=T.ALL):
            with T.Scale("device"):
                if name == "allreduce":
                    T.allreduce(X, impl=impl)
                elif name == "broadcast":
                    T.broadcast(X, impl=impl)
                elif name == "all_gather":
                    T.all_gather(X, Y, impl=impl)
                elif name == "reduce_scatter":
                    T.reduce_scatter(X, Y, impl=impl)
                else:
                    T.all_to_all(X, Y, impl=impl)

    return whole_tensors


def double(elements: int, threads: int = 128):
    """Y = 2 X: a plain TileLang program."""

    @T.prim_func
    def doubled(X: T.Tensor((elements,), "float32"), Y: T.Tensor((elements,), "float32")):
        with T.Kernel(elements // threads, threads=threads) as block:
            for i in T.Parallel(threads):
                Y[block * threads + i] = 2 * X[block * threads + i]

    return doubled
