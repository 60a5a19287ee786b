# SPDX-License-Identifier: MIT
"""The programs of ag_gemm.py: a gather of rows, and the GEMM that reads them."""

from typing import Any

import tilescale.language as T
from tilescale.ops.block_gemm import multiply_blocks, scale_tiles
from tilescale.ops.gemm_tiles import CHUNKS, GemmSpec, activate, add_bias, gate, multiply, multiply_by_two, rescale
from tilescale.ops.kernels import scheduled
from tilescale.passes.overlap.schedule import CALLER, SOURCE, Move
from tilescale.program.builder import Declaration


@Declaration(6, grids=2, results=lambda size, of, *_: max(len(of.parts), 1))
def program(size: int, of: GemmSpec, gathers: bool = True, slices: int = 1, blocks: int = 0) -> Any:
    """`sequential`, whose tiles of local rows read these in place, and the others theirs as they arrive; or, if it does
    not gather, as they are there.

    Args:
        slices: number of slices of columns in which the rows of a shard of one chunk are sent.
        blocks: number of persistent blocks for local rows, each of which loads the next tile while it stores one, and
            of as many for the rows of other ranks; 0: one block for each tile.
    """
    how: dict[str, Any] = {"local": SOURCE, "group": of.tiles.group, "blocks": blocks or None}
    how["carrier"] = None if gathers else CALLER
    rows = Move("all_gather", ("A", "G"), chunk=of.chunk, chunks=CHUNKS, slices=slices if slices > 1 else None, **how)
    scales = [Move("all_gather", ("of_A", "of_G"), chunks=1, **how)] if of.scaled else []
    return scheduled(sequential(size, of), *scales, rows)


def sequential(size: int, of: GemmSpec) -> Any:
    """The gather of all ranks' rows, and of their scales, then their GEMM; or GEMMs with several matrices side by side,
    whose results are C, D and E, the last one unused of two."""
    rows, N, K = T.dynamic("rows"), of.N, of.K
    gemms, scales = 2 if of.gated else 1, of.scales(1)
    kind = "float32" if of.scaled else of.dtype
    widths = (*(of.parts or (N,)), *of.parts[:1])

    @T.prim_func
    def all_gather_matmul(
        A: T.Tensor((1, rows, K), of.dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        Up: T.Tensor(of.b_shape, of.b_dtype),  # the matrix that is gated
        bias: T.Tensor((gemms * N if of.biased else 1,), of.result),
        of_A: T.Tensor(scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        C: T.Tensor((size, rows, N), of.result),
    ):
        gather_and_multiply(A, B, Up, bias, of_A, of_B, (C,), size, of)

    if not of.parts:
        return all_gather_matmul

    @T.prim_func
    def all_gather_gemms(
        A: T.Tensor((1, rows, K), of.dtype),
        B: T.Tensor(of.b_shape, of.b_dtype),
        Up: T.Tensor(of.b_shape, of.b_dtype),
        bias: T.Tensor((N if of.biased else 1,), of.result),
        of_A: T.Tensor(scales[0], kind),
        of_B: T.Tensor(scales[1], kind),
        C: T.Tensor((size, rows, widths[0]), of.result),
        D: T.Tensor((size, rows, widths[1]), of.result),
        E: T.Tensor((size, rows, widths[2]), of.result),
    ):
        gather_and_multiply(A, B, Up, bias, of_A, of_B, (C, D, E)[: len(of.parts)], size, of)

    return all_gather_gemms


@T.macro
def gather_and_multiply(A, B, Up, bias, of_A, of_B, results, size, of):
    """A grid of the tiles of the results, behind the gather of rows and scales."""
    rows, kind, tiles = A.shape[1], "float32" if of.scaled else of.dtype, of.tiles
    with T.Kernel(device=size, block=(*tiles.grid(rows, of.N), size), threads=tiles.threads) as (column, row, owner):
        G = T.alloc((size, rows, of.K), of.dtype, level="l2")
        of_G = T.alloc((size, *of_A.shape[1:]), kind, level="l2") if of.scaled else None
        with T.Scale("device"):
            if of.scaled:
                T.all_gather(of_A, of_G)
            T.all_gather(A, G)
        with T.Scale("block"):
            on_chip, m, n = tiles_of(of), row * tiles.m, column * tiles.n
            make_tile(on_chip, G, owner, m, n, B, Up, bias, of_G, of_B, results, owner, of)


def tiles_of(of: GemmSpec) -> tuple[Any, ...]:
    """On-chip tiles of a block: pipeline stages of a and b, sums, the stored tile; b and sums again if it is gated."""
    tiles = of.tiles
    a = T.alloc((tiles.m, of.depth), of.dtype, level="l1")
    out = T.alloc((tiles.m, tiles.n), of.result, level="l1")
    b, up = (T.alloc(of.b_tile, of.b_dtype, level="l1") if n <= of.gated else None for n in range(2))
    c, c_up = (T.alloc((tiles.m, tiles.n), "float32", level="l0") if n <= of.gated else None for n in range(2))
    return a, b, up, c, c_up, *scale_tiles(of), out


@T.macro
def make_tile(on_chip, A, source, m, n, B, Up, bias, of_A, of_B, results, shard, of):
    """A tile of the result, from the rows of A[source]."""
    a, b, up, c, c_up, part, of_rows, of_b, of_up, held, out = on_chip
    rows, N = A.shape[1], of.N
    T.clear(c)
    if of.gated:
        T.clear(c_up)
    if of.blocks:
        scaling = a, b, up, c, c_up, part, of_rows, of_b, of_up, held
        multiply_blocks(A, source, m, of_A, B, Up, n, of_B, scaling, of)
    elif of.gated:
        multiply_by_two(A, source, m, B, Up, n, a, b, up, c, c_up, of.K, of.tiles, of.transposed)
    else:
        multiply(A, source, m, B, n, a, b, c, of.K, of.tiles, of.transposed)
    if of.scaled and not of.blocks:
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
    store(out, results, shard, m, n, of.parts)


@T.macro
def store(out, results, shard, m, n, parts):
    """Store a tile in the result that has its columns."""
    if len(results) == 1:
        T.copy(out, results[0][shard, m, n])
    elif n < parts[0]:
        T.copy(out, results[0][shard, m, n])
    else:
        store(out, results[1:], shard, m, n - parts[0], parts[1:])
