# SPDX-License-Identifier: MIT
"""Matrices rounded to float8, with a scale for each row, for each square of 128 x 128, or for the whole.

Rows are read once: a block keeps its rows in registers, finds the largest magnitude of each, and rounds them. Elements
that share a scale with other blocks are read twice, for the largest magnitude and to be rounded, and are transposed
meanwhile where the result's layout asks for it.

Scales are powers of two, and magnitudes are compared as their bits: for these a NaN is larger than infinity, and that
larger than all numbers. So results have the same bits everywhere.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import BLOCK, dense
from tilescale.ops.kernels import call_local, local_kernel
from tilescale.ops.layout import dtype_name

LEAST = 0x2B8CBCCC
"""The bits of the least that the largest magnitude is taken to be, 1e-12 in float32, as torchao has it: zeros have a
scale, too."""

INFINITY, NAN = 0x7F800000, 0x7FC00000
"""Their bits in float32."""

MAGNITUDE = 0x7FFF
"""The bits of a bfloat16 number without its sign."""

FRACTION = 23
"""Bits of the fraction of a float32 number."""

BFLOAT = 16
"""By how many bits a number is shorter in bfloat16."""

BIAS = 127
"""Bias of the exponent."""

UNIT = 8
"""Numbers that a thread loads at once."""

LINE = 16
"""Numbers that it stores at once, at most."""

HELD, ROW_HELD = 64, 128
"""Numbers that a thread keeps of several rows, and of a single one, at most."""

THREADS, MOST_THREADS = 128, 1024
"""Least and largest number of threads of a block."""

TALL = 64
"""Rows of a block, at most."""

TILE = (128, 64)
"""Rows and columns of a tile that is read twice: a line of the transposed result has 128 bytes."""

SQUARE_THREADS = 256
"""Threads of a block for a square: each keeps 64 numbers."""

STRIP = 8
"""Number of tiles whose magnitudes a block compares before it publishes the maximum."""


def rounded_rows(x: torch.Tensor, kind: torch.dtype, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A bfloat16 matrix in float8, contiguous, and the scale of each row, (rows,), float32: a power of two.

    The largest magnitude of a row, or of the matrix, becomes at most the largest number of the type. If it is not
    finite, the scale and all numbers with it are NaN. Raises ArgumentError: more columns than a block can keep of a
    row.

    Args:
        x: (rows, columns), columns a multiple of 16; contiguous, the transpose of a contiguous matrix, or copied.
        kind: torch.float8_e4m3fn or torch.float8_e5m2.
        scaling: "rowwise" or "tensorwise", where the matrix has one scale.
    """
    rows, columns = x.shape
    made, scales = x.new_empty(rows, columns, dtype=kind), x.new_empty(rows, dtype=torch.float32)
    if not x.numel():
        return made, scales.fill_(1)
    across = not x.is_contiguous() and x.t().is_contiguous()
    given, to = dense(x.t() if across else x).view(torch.int16), dtype_name(kind)
    if scaling == "rowwise" and not across:
        if columns > ROW_HELD * MOST_THREADS:
            raise ArgumentError(f"a row has {columns} numbers", hint=f"supported: {ROW_HELD * MOST_THREADS}")
        call_local(local_kernel(rows_program, columns, to), given, made, scales)
        return made, scales
    peaks = x.new_zeros(rows if scaling == "rowwise" else 1, dtype=torch.int32)
    extents = len(given) if across else None, given.shape[1]
    call_local(local_kernel(tiles_program, *extents, to, across, scaling == "rowwise"), given, peaks, made, scales)
    return made, scales


def rounded_groups(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A bfloat16 matrix in float8, contiguous, and the scale of each 128 numbers of a row, (rows, columns / 128)."""
    rows, columns = x.shape
    made, scales = rounded_rows(dense(x).view(-1, BLOCK), kind, "rowwise")
    return made.view(rows, columns), scales.view(rows, columns // BLOCK)


def rounded_squares(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A bfloat16 matrix in float8, contiguous, and the scale of each square of 128 x 128 numbers: a power of two.

    Args:
        x: (rows, columns), multiples of 128; contiguous, the transpose of a contiguous matrix, or copied.
        kind: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    rows, columns = x.shape
    made, scales = (
        x.new_empty(rows, columns, dtype=kind),
        x.new_empty(rows // BLOCK, columns // BLOCK, dtype=torch.float32),
    )
    across = not x.is_contiguous() and x.t().is_contiguous()
    given = dense(x.t() if across else x).view(torch.int16)
    call_local(local_kernel(squares_program, given.shape[1], dtype_name(kind), across), given, made, scales)
    return made, scales


def tile_of(columns: int) -> tuple[int, int, int]:
    """Rows and columns that a block keeps, and its threads, each of which has as much of a row as the others."""
    threads = max(THREADS, 1 << (-(-columns // ROW_HELD) - 1).bit_length())
    at_once = UNIT * threads
    wide = -(-columns // at_once) * at_once if columns > at_once else 1 << (columns - 1).bit_length()
    return min(1 << max(HELD * threads // wide, 1).bit_length() - 1, TALL), wide, threads


def largest(kind: str) -> int:
    """The largest number of a type, as its bits in float32."""
    return int(torch.tensor(torch.finfo(getattr(torch, kind)).max, dtype=torch.float32).view(torch.int32))


def power(exponent: Any, magnitude: Any) -> Any:
    """Two to the power of the exponent; NaN where the magnitude is infinity or NaN. It is given by its bits."""
    return T.reinterpret(T.if_then_else(magnitude < INFINITY, (exponent + BIAS) << FRACTION, NAN), "float32")


@T.macro
def magnitudes(x, sizes):
    """sizes = max(sizes, |x|), as the bits of bfloat16."""
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        sizes[i, j] = T.max(sizes[i, j], T.cast(x[i, j], "int32") & MAGNITUDE)


@T.macro
def scales_of(top, scale, inverse, most):
    """The power of two that makes the largest magnitude at most `most`, its exponent that of math.frexp of their
    quotient; and one over it."""
    for i in T.Parallel(top.shape[0]):
        top[i] = T.max(top[i] << BFLOAT, LEAST)
        exponent = ((top[i] - most) >> FRACTION) + 1
        scale[i] = power(exponent, top[i])
        inverse[i] = power(-exponent, top[i])


def rounded(x: Any, inverse: Any, kind: str) -> Any:
    """A number, given by its bits as bfloat16, over its scale."""
    return T.cast(T.reinterpret(T.cast(x, "int32") << BFLOAT, "float32") * inverse, kind)


def spread(i: Any, j: Any) -> tuple[Any, Any]:
    """Swizzled position of a tile that is read across: concurrent threads read from different banks.

    A thread stores 16 bytes of a line of the result, and so reads 16 rows, eight threads side by side.
    """
    return i, (j // UNIT ^ i // LINE % UNIT) * UNIT + j % UNIT


def rows_program(columns: int, kind: str) -> Any:
    """Q[i] = X[i] / scales[i], of rows of which a block keeps some."""
    rows, (high, wide, threads), most = T.dynamic("rows"), tile_of(columns), largest(kind)

    @T.prim_func
    def round_rows(
        X: T.Tensor((rows, columns), "int16"),  # bits of bfloat16
        Q: T.Tensor((rows, columns), kind),
        scales: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, high), threads=threads) as tile:
            x, q = T.alloc((high, wide), "int16", level="l0"), T.alloc((high, wide), kind, level="l0")
            sizes, top = T.alloc((high, wide), "int32", level="l0"), T.alloc((high,), "int32", level="l0")
            scale, inverse = (T.alloc((high,), "float32", level="l0") for _ in range(2))
            T.copy(X[tile * high, 0], x)
            T.clear(sizes)
            magnitudes(x, sizes)
            T.reduce_max(sizes, top, dim=1)
            scales_of(top, scale, inverse, most)
            for i, j in T.Parallel(high, wide):
                q[i, j] = rounded(x[i, j], inverse[i], kind)
            T.copy(q, Q[tile * high, 0])
            T.copy(scale, scales[tile * high])

    return round_rows


def tiles_program(rows: int | None, columns: int, kind: str, across: bool, each: bool) -> Any:
    """Q = X / scale, or across, its transpose, tile by tile; the matrix shares a scale, or each column of X does.

    `rows`: None for any number.
    """
    rows, (high, wide), most = T.dynamic("rows") if rows is None else rows, TILE, largest(kind)
    shape, tile = ((columns, rows), (wide, high)) if across else ((rows, columns), (high, wide))
    count = tile[0] if across else 1  # so that threads get adjacent elements of Q

    @T.prim_func
    def round_tiles(
        X: T.Tensor((rows, columns), "int16"),  # bits of bfloat16
        peaks: T.Tensor((columns if each else 1,), "int32"),  # zeros
        Q: T.Tensor(shape, kind),
        scales: T.Tensor((shape[0],), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, high * STRIP), T.ceildiv(columns, wide), threads=THREADS) as (strip, column):
            x, sizes = T.alloc((high, wide), "int16", level="l0"), T.alloc((high, wide), "int32", level="l0")
            top, highest = T.alloc((wide,), "int32", level="l0"), T.alloc((1,), "int32", level="l0")
            T.clear(sizes)
            for s in T.serial(STRIP):
                T.copy(X[(strip * STRIP + s) * high, column * wide], x)
                magnitudes(x, sizes)
            T.reduce_max(sizes, top, dim=0)
            if each:
                for j in T.Parallel(wide):
                    if column * wide + j < columns:
                        T.atomic_max(peaks[column * wide + j], top[j])
            else:
                T.reduce_max(top, highest, dim=0)
                for i in T.Parallel(1):
                    T.atomic_max(peaks[i], highest[i])
        with T.Kernel(T.ceildiv(rows, high), T.ceildiv(columns, wide), threads=THREADS) as (m, n):
            first, second = (n * wide, m * high) if across else (m * high, n * wide)
            x = T.alloc((high, wide), "int16", level="l1" if across else "l0")
            q = T.alloc(tile, kind, level="l0")
            top, scale, inverse = (T.alloc((count,), kind, level="l0") for kind in ("int32", "float32", "float32"))
            if across:
                T.annotate_layout({x: T.Layout((high, wide), spread)})
            T.copy(X[m * high, n * wide], x)
            for i in T.Parallel(count):
                top[i] = peaks[T.min(first + i, columns - 1) if each else 0]
            scales_of(top, scale, inverse, most)
            for i, j in T.Parallel(*tile):
                q[i, j] = rounded(x[j, i] if across else x[i, j], inverse[i if across else 0], kind)
            T.copy(q, Q[first, second])
            if second == 0:
                for i in T.Parallel(tile[0]):
                    if first + i < shape[0]:
                        scales[first + i] = scale[i if across else 0]

    return round_tiles


def squares_program(columns: int, kind: str, across: bool) -> Any:
    """Q = X / scale, or across, its transpose, square by square."""
    rows, most = T.dynamic("rows"), largest(kind)
    shape, squares = (rows, columns), (rows // BLOCK, columns // BLOCK)

    @T.prim_func
    def round_squares(
        X: T.Tensor((rows, columns), "int16"),  # bits of bfloat16
        Q: T.Tensor(shape[::-1] if across else shape, kind),
        scales: T.Tensor(squares[::-1] if across else squares, "float32"),
    ):
        with T.Kernel(rows // BLOCK, columns // BLOCK, threads=SQUARE_THREADS) as (m, n):
            i0, j0 = (n, m) if across else (m, n)
            x = T.alloc((BLOCK, BLOCK), "int16", level="l1" if across else "l0")
            q, sizes = (T.alloc((BLOCK, BLOCK), dtype, level="l0") for dtype in (kind, "int32"))
            top, scale, inverse = (T.alloc((BLOCK,), dtype, level="l0") for dtype in ("int32", "float32", "float32"))
            highest = T.alloc((1,), "int32", level="l0")
            if across:
                T.annotate_layout({x: T.Layout((BLOCK, BLOCK), spread)})
            T.copy(X[m * BLOCK, n * BLOCK], x)
            for i, j in T.Parallel(BLOCK, BLOCK):
                sizes[i, j] = T.cast(x[j, i] if across else x[i, j], "int32") & MAGNITUDE
            T.reduce_max(sizes, top, dim=1)
            T.reduce_max(top, highest, dim=0)
            for i in T.Parallel(BLOCK):
                top[i] = highest[0]
            scales_of(top, scale, inverse, most)
            for i, j in T.Parallel(BLOCK, BLOCK):
                q[i, j] = rounded(x[j, i] if across else x[i, j], inverse[i], kind)
            T.copy(q, Q[i0 * BLOCK, j0 * BLOCK])
            for i in T.Parallel(BLOCK):
                if i == 0:
                    scales[i0, j0] = scale[i]

    return round_squares
