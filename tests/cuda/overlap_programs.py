# SPDX-License-Identifier: MIT
"""GEMMs that run while operands arrive or results leave: a grid that waits, sends and signals."""

from typing import Any

import tilescale.language as T

DTYPE = "bfloat16"
GROUP = 8
"""Rows of tiles whose tiles follow each other, so that operands stay in the cache."""


def ag_gemm(
    devices: int = 2,
    shape: tuple[int, int, int] = (8192, 3584, 8192),
    tile: tuple[int, int, int] = (128, 256, 64),
    chunk: int = 512,
    stages: int = 4,
    blocks: int = 0,
) -> Any:
    """C = the gathered rows of all devices times B; a tile waits for the chunk of rows that it multiplies.

    The rank that raises `arrived` writes the rows. `blocks`: number of blocks of a persistent grid.
    """
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    rows = m_all // devices
    tm, tn = rows // bm, n_all // bn
    assert tm % GROUP == 0, "whole groups of each device"
    total = devices * tm * tn
    blocks = blocks or total

    @T.prim_func
    def ag(
        gathered: T.Tensor((devices, rows, k_all), DTYPE),
        B: T.Tensor((n_all, k_all), DTYPE),
        C: T.Tensor((devices, rows, n_all), DTYPE),
        arrived: T.Tensor((devices, rows // chunk), "int32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=256) as bid:
            with T.Scale("block"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                cs = T.alloc((bm, bn), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    for wave in T.serial(T.ceildiv(total - bid, blocks)):
                        i = wave * blocks + bid
                        shard = (rank + i // (tm * tn)) % size
                        m = i % (tm * tn) // (GROUP * tn) * GROUP + i % GROUP
                        n = i % (GROUP * tn) // GROUP
                        T.wait(arrived[shard, m * bm // chunk], ">=", 1)
                        T.clear(c)
                        for k in T.Pipelined(k_all // bk, num_stages=stages):
                            T.copy(gathered[shard, m * bm, k * bk], a)
                            T.copy(B[n * bn, k * bk], b)
                            T.gemm(a, b, c, transpose_B=True)
                        T.copy(c, cs)
                        T.copy(cs, C[shard, m * bm, n * bn])

    return ag


def ag_gemm_by_loads(
    devices: int = 2,
    shape: tuple[int, int, int] = (8192, 3584, 8192),
    tile: tuple[int, int, int] = (128, 256, 64),
    stages: int = 4,
    blocks: int = 0,
    waits: bool = False,
    impl: str | None = None,
) -> Any:
    """C = the rows of all devices times B; tiles are loaded from their owners, local rows first.

    If `waits`, devices signal `ready` when their rows are complete, and tiles wait for it. `blocks`: as for `ag_gemm`.
    """
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    tm, tn = m_all // devices // bm, n_all // bn
    total = devices * tm * tn
    blocks = blocks or total

    @T.prim_func
    def pulled(
        A: T.Tensor((m_all // devices, k_all), DTYPE),
        B: T.Tensor((n_all, k_all), DTYPE),
        C: T.Tensor((devices, m_all // devices, n_all), DTYPE),
        ready: T.Tensor((devices,), "int32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=256) as bid:
            with T.Scale("block"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                cs = T.alloc((bm, bn), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    for wave in T.serial(T.ceildiv(total - bid, blocks)):
                        i = wave * blocks + bid
                        owner = (rank + i // (tm * tn)) % size
                        m = i % (tm * tn) // tn
                        n = i % tn
                        if waits:
                            T.wait(ready[owner], ">=", 1)
                        T.clear(c)
                        for k in T.Pipelined(k_all // bk, num_stages=stages):
                            T.copy(A[m * bm, k * bk], a, src=owner, impl=impl)
                            T.copy(B[n * bn, k * bk], b)
                            T.gemm(a, b, c, transpose_B=True)
                        T.copy(c, cs)
                        T.copy(cs, C[owner, m * bm, n * bn])

    return pulled


def rs_gemm(
    devices: int = 2,
    shape: tuple[int, int, int] = (8192, 8192, 3584),
    tile: tuple[int, int, int] = (128, 256, 64),
    chunk: int = 512,
    stages: int = 4,
    direct: bool = False,
    blocks: int = 0,
) -> Any:
    """C = the sum over devices of A times B, each device its rows: parts of peers' rows first, local rows last.

    A part goes to the local `parts`, whose chunks are counted in `done` for the sender to the owner's inbox; or tile by
    tile straight into that inbox (`direct`). `blocks`: that many blocks work on tile after tile.
    """
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    rows = m_all // devices
    tm, tn = rows // bm, n_all // bn
    per = chunk // bm * tn
    total = devices * tm * tn
    blocks = blocks or total

    @T.prim_func
    def rs(
        A: T.Tensor((devices, rows, k_all), DTYPE),
        B: T.Tensor((n_all, k_all), DTYPE),
        C: T.Tensor((rows, n_all), DTYPE),
        parts: T.Tensor((devices, rows, n_all), DTYPE),
        inbox: T.Tensor((devices, rows, n_all), DTYPE),
        done: T.Tensor((devices, rows // chunk), "int32"),
        arrived: T.Tensor((devices, rows // chunk), "int32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=256) as bid:
            with T.Scale("block"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                out = T.alloc((bm, bn), DTYPE, level="l1")
                c = T.alloc((bm, bn), "float32", level="l0")
                part = T.alloc((bm, bn), DTYPE, level="l0")
                with T.Scale("device") as (rank, size):
                    for wave in T.serial(T.ceildiv(total - bid, blocks)):
                        i = wave * blocks + bid
                        owner = (rank + 1 + i // (tm * tn)) % size
                        group = i % (tm * tn) // per
                        m = group * (chunk // bm) + i % per % (chunk // bm)
                        n = i % per // (chunk // bm)
                        T.clear(c)
                        for k in T.Pipelined(k_all // bk, num_stages=stages):
                            T.copy(A[owner, m * bm, k * bk], a)
                            T.copy(B[n * bn, k * bk], b)
                            T.gemm(a, b, c, transpose_B=True)
                        if owner != rank:
                            T.copy(c, out)
                            if direct:
                                T.copy(out, inbox[rank, m * bm, n * bn], dst=owner, signal=arrived[rank, group])
                            else:
                                T.copy(out, parts[owner, m * bm, n * bn])
                                T.signal(done[owner, group])
                        else:
                            for s in T.serial(size - 1):
                                src = (rank + 1 + s) % size
                                T.wait(arrived[src, group], ">=", per if direct else 1)
                                T.copy(inbox[src, m * bm, n * bn], part)
                                for x, y in T.Parallel(bm, bn):
                                    c[x, y] += part[x, y]
                            T.copy(c, out)
                            T.copy(out, C[m * bm, n * bn])

    return rs


def put(
    devices: int = 2, rows: int = 8192, columns: int = 8192, blocks: int = 0, impl: str | None = "tma", wide: int = 256
) -> Any:
    """Every device writes its X into the Y of the next one; each of `blocks` blocks (0: one a tile) its tiles."""
    high = 128
    across = columns // wide
    tiles = rows // high * across
    blocks = blocks or tiles

    @T.prim_func
    def put_tiles(X: T.Tensor((rows, columns), DTYPE), Y: T.Tensor((rows, columns), DTYPE)):
        with T.Kernel(device=devices, block=blocks, threads=256) as block:
            with T.Scale("block"):
                x = T.alloc((high, wide), DTYPE, level="l1")
                with T.Scale("device") as (rank, size):
                    for turn in T.serial(T.ceildiv(tiles - block, blocks)):
                        number = block + turn * blocks
                        m, n = number // across * high, number % across * wide
                        T.copy(X[m, n], x)
                        T.copy(x, Y[m, n], dst=(rank + 1) % size, impl=impl)

    return put_tiles


def ag_gemm_senders(
    devices: int = 2,
    shape: tuple[int, int, int] = (8192, 3584, 8192),
    tile: tuple[int, int, int] = (128, 256, 64),
    chunk: int = 512,
    stages: int = 3,
    blocks: int = 132,
    senders: int = 16,
) -> Any:
    """The first blocks send the local rows to all peers, the others multiply, waiting for chunks of rows."""
    m_all, n_all, k_all = shape
    bm, bn, bk = tile
    rows = m_all // devices
    tm, tn = rows // bm, n_all // bn
    assert tm % GROUP == 0, "whole groups of each device"
    tiles, workers = devices * tm * tn, blocks - senders
    across = k_all // bn
    pieces = tm * across

    @T.prim_func
    def ag_by_senders(
        gathered: T.Tensor((devices, rows, k_all), DTYPE),
        B: T.Tensor((n_all, k_all), DTYPE),
        C: T.Tensor((devices, rows, n_all), DTYPE),
        arrived: T.Tensor((devices, rows // chunk), "int32"),
    ):
        with T.Kernel(device=devices, block=blocks, threads=256) as block:
            with T.Scale("block"):
                a = T.alloc((bm, bk), DTYPE, level="l1")
                b = T.alloc((bn, bk), DTYPE, level="l1")
                out = T.alloc((bm, bn), DTYPE, level="l1")  # of the GEMM, or a piece in flight
                c = T.alloc((bm, bn), "float32", level="l0")
                with T.Scale("device") as (rank, size):
                    if block < senders:
                        for turn in T.serial(T.ceildiv(pieces - block, senders)):
                            piece = block + turn * senders
                            m, k = piece // across * bm, piece % across * bn
                            T.copy(gathered[rank, m, k], out)
                            for step in T.serial(1, size):
                                peer = (rank + step) % size
                                T.copy(out, gathered[rank, m, k], dst=peer, signal=arrived[rank, m // chunk])
                    else:
                        for turn in T.serial(T.ceildiv(tiles - (block - senders), workers)):
                            i = block - senders + turn * workers
                            shard = (rank + size - i // (tm * tn)) % size
                            m = i % (tm * tn) // (GROUP * tn) * GROUP + i % GROUP
                            n = i % (GROUP * tn) // GROUP
                            if shard != rank:
                                T.wait(arrived[shard, m * bm // chunk], ">=", chunk // bm * across)
                            T.clear(c)
                            for kk in T.Pipelined(k_all // bk, num_stages=stages):
                                T.copy(gathered[shard, m * bm, kk * bk], a)
                                T.copy(B[n * bn, kk * bk], b)
                                T.gemm(a, b, c, transpose_B=True)
                            T.copy(c, out)
                            T.copy(out, C[shard, m * bm, n * bn])

    return ag_by_senders
