# SPDX-License-Identifier: MIT
"""The programs of ag_gemm.py: the copy queue sends rows, tiles of the product wait for them.

One grid computes the tiles of this rank's rows, in place, and then those of the other ranks' rows.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.block_gemm import multiply_blocks, scale_tiles
from tilescale.ops.persistent import turns_of
from tilescale.ops.products import CHUNKS, GemmSpec, activate, add_bias, gate, multiply, multiply_by_two, rescale


def program(size: int, of: GemmSpec, gathers: bool, slices: int = 1, blocks: int = 0) -> Any:
    """Own rows first, then those of the others as they arrive; or, if it does not gather, as they are there.

    Args:
        slices: number of slices of columns in which the rows of a shard of one chunk are sent.
        blocks: number of persistent blocks for local rows, each of which loads the next tile while it stores one, and
            of as many for the rows of other ranks; 0: one block for each tile.
    """
    rows, N, K, tiles = T.dynamic("rows"), of.N, of.K, of.tiles
    products, shapes = 2 if of.gated else 1, of.scales(1, size)
    kind, a_shard = "float32" if of.scaled else of.dtype, tiles.count(rows, N)
    grid = (blocks, min(size, 2)) if blocks else (a_shard, size)

    @T.prim_func
    def all_gather_matmul(
        A: T.Tensor((1, rows, K), of.dtype),
        G: T.Tensor((size, rows, K), of.dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        Up: T.Tensor(of.b_shape, of.b_dtype),  # the matrix that is gated
        bias: T.Tensor((products * N if of.biased else 1,), of.result),
        of_A: T.Tensor(shapes[0], kind),
        of_G: T.Tensor(shapes[1], kind),
        of_B: T.Tensor(shapes[2], kind),
        C: T.Tensor((size, rows, N), of.result),
    ):
        with T.Kernel(device=size, block=grid, threads=tiles.threads) as (tile, part):
            arrived, scales = T.alloc_flags((size, CHUNKS)), T.alloc_flags((size,))
            if gathers and size > 1:
                with T.Scale("device") as (rank, _):
                    send_rows(A, G, of_A, of_G, arrived, scales, rank, size, of, slices)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                on_chip = tiles_of(of)
                if part == 0:
                    for turn in T.serial(turns_of(tile, blocks, a_shard)) if blocks else [0]:
                        m, n = tiles.at(tile + turn * blocks, rows, N)
                        make_tile(on_chip, A, 0, m, n, B, Up, bias, of_A, of_B, C, rank, None, None, of)
                elif size > 1:
                    for turn in T.serial(turns_of(tile, blocks, (size - 1) * a_shard)) if blocks else [0]:
                        if blocks:
                            before, m, n = tiles.of_shards(tile + turn * blocks, size - 1, rows, N)
                        else:
                            before, m, n = part - 1, *tiles.at(tile, rows, N)
                        # The rank before was the first to send here, the one before it the second.
                        shard = (rank + size - 1 - before) % size
                        come = (arrived, scales) if gathers else (None, None)
                        parts = slices if gathers else 1
                        make_tile(on_chip, G, shard, m, n, B, Up, bias, of_G, of_B, C, shard, *come, of, parts)

    return all_gather_matmul


@T.macro
def send_rows(A, G, of_A, of_G, arrived, scales, rank, size, of, slices=1):
    """Send this rank's rows to all ranks by the copy queue, in chunks or slices of columns, their scales first."""
    rows, wide = A.shape[1], of.K // slices
    for step in T.serial(1, size):
        if of.blocks:
            T.copy(of_A[0, :, :, :], of_G[rank, :, :, :], dst=(rank + step) % size, signal=scales[rank])
        elif of.scaled:
            T.copy(of_A[0, :], of_G[rank, :], dst=(rank + step) % size, signal=scales[rank])
        if slices == 1:
            for i in T.serial(T.ceildiv(rows, of.chunk)):
                first, last = i * of.chunk, T.min((i + 1) * of.chunk, rows)
                T.copy(A[0, first:last, :], G[rank, first:last, :], dst=(rank + step) % size, signal=arrived[rank, i])
        else:
            for i in T.serial(slices):
                first, last = i * wide, (i + 1) * wide
                T.copy(A[0, :, first:last], G[rank, :, first:last], dst=(rank + step) % size, signal=arrived[rank, i])


def tiles_of(of: GemmSpec) -> tuple[Any, ...]:
    """On-chip tiles of a block: pipeline stages of a and b, sums, the stored tile; b and sums again if it is gated."""
    tiles = of.tiles
    a = T.alloc((tiles.m, of.depth), of.dtype, level="l1")
    out = T.alloc((tiles.m, tiles.n), of.result, level="l1")
    b, up = (T.alloc(of.b_tile, of.b_dtype, level="l1") if n <= of.gated else None for n in range(2))
    c, c_up = (T.alloc((tiles.m, tiles.n), "float32", level="l0") if n <= of.gated else None for n in range(2))
    return a, b, up, c, c_up, *scale_tiles(of), out


@T.macro
def make_tile(on_chip, A, source, m, n, B, Up, bias, of_A, of_B, C, shard, arrived, scales, of, slices=1):
    """A tile of the result, from the rows of A[source]; with flags, when these and their scales have arrived."""
    a, b, up, c, c_up, part, of_rows, of_b, of_up, held, out = on_chip
    rows, N = A.shape[1], of.N
    columns = (None, 0) if slices == 1 else (arrived, of.K // slices // of.depth)
    T.clear(c)
    if of.gated:
        T.clear(c_up)
    if arrived is not None and slices == 1:
        T.wait(arrived[source, m // of.chunk], ">=", 1)
    if of.blocks:
        scaling = a, b, up, c, c_up, part, of_rows, of_b, of_up, held
        if scales is not None:
            T.wait(scales[source], ">=", 1)
        multiply_blocks(A, source, m, of_A, B, Up, n, of_B, scaling, of)
    elif of.gated:
        multiply_by_two(A, source, m, B, Up, n, a, b, up, c, c_up, of.K, of.tiles, of.transposed, *columns)
    else:
        multiply(A, source, m, B, n, a, b, c, of.K, of.tiles, of.transposed, *columns)
    if of.scaled and not of.blocks:
        if scales is not None:
            T.wait(scales[source], ">=", 1)
        rescale(c, of_A, source, m, of_B, 0, n, rows, N)
        if of.gated:
            rescale(c_up, of_A, source, m, of_B, N, n, rows, N)
    if of.biased:
        add_bias(c, bias, n, N)
        if of.gated:
            add_bias(c_up, bias, n, N, N)
    if of.activation != "":
        activate(c, of.activation)
    if of.gated:
        gate(c, c_up)
    T.copy(c, out)
    T.copy(out, C[shard, m, n])
