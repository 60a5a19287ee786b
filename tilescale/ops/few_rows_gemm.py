# SPDX-License-Identifier: MIT
"""Grouped GEMMs of few rows of each expert, whose time is that of loading the weights.

Weights are the left operand: a tile has 128 of their rows, and 32 rows of tokens. So a block loads hardly more than
weights, and has memory for many steps of them in flight. As the right operand they would come with 128 rows of tokens,
which take as long to load, and of which most have no token.
"""


import tilescale.language as T
from tilescale.ops.float8_wire import GROUP, quantize
from tilescale.ops.gemm_tiles import DEPTH, launch, swiglu
from tilescale.ops.persistent import iterations_of
from tilescale.program.wire import WIRE, last_of

ROWS, WIDE = 32, 128
"""Rows of tokens, and of weights, of a tile."""

STAGES = 5
"""Pipeline stages: as many as fit."""


@T.macro
def add_scaled(c, part, row_scales, scale):
    """c += part, with scales of its columns, which are rows of tokens, and of the weights."""
    for i, j in T.Parallel(WIDE, ROWS):
        c[i, j] += part[i, j] * (row_scales[j] * scale)


@T.macro
def multiply(A, tile, B, expert, first, second, c, c_second):
    """The GEMMs of weights from rows `first` and `second` on with a tile's rows of tokens."""
    a = T.alloc((ROWS, DEPTH), A.dtype, level="l1")
    b, b_second = (T.alloc((WIDE, DEPTH), B.dtype, level="l1") for _ in range(2))
    for k in T.Pipelined(T.ceildiv(int(B.shape[2]), DEPTH), num_stages=STAGES):
        T.copy(A[tile * ROWS, k * DEPTH], a)
        T.copy(B[expert, first, k * DEPTH], b)
        T.copy(B[expert, second, k * DEPTH], b_second)
        T.gemm(b, a, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(b_second, a, c_second, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)


@T.macro
def multiply_scaled(A, of_A, tile, B, of_B, expert, first, second, c, c_second):
    """`multiply` in float8, with scales of groups of A, and of squares or rows of B."""
    by_rows, last = len(of_B.shape) == 2, int(of_B.shape[1]) - 1
    a = T.alloc((ROWS, GROUP), A.dtype, level="l1")
    b, b_second = (T.alloc((WIDE, GROUP), B.dtype, level="l1") for _ in range(2))
    scales, part = T.alloc((ROWS,), "float32", level="l1"), T.alloc((WIDE, ROWS), "float32", level="l0")
    for k in T.Pipelined(int(B.shape[2]) // GROUP, num_stages=STAGES):
        T.copy(A[tile * ROWS, k * GROUP], a)
        T.copy(B[expert, first, k * GROUP], b)
        T.copy(B[expert, second, k * GROUP], b_second)
        T.copy(of_A[k, tile * ROWS], scales)
        T.gemm(b, a, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
        add_scaled(c, part, scales, 1.0 if by_rows else of_B[expert, first // GROUP, k])
        T.gemm(b_second, a, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
        add_scaled(c_second, part, scales, 1.0 if by_rows else of_B[expert, T.min(second // GROUP, last), k])
    if by_rows:
        for i, j in T.Parallel(WIDE, ROWS):
            c[i, j] *= of_B[expert, first + i]
        for i, j in T.Parallel(WIDE, ROWS):
            c_second[i, j] *= of_B[expert, T.min(second + i, last)]


@T.macro
def few_gated_grid(A, of_A, B, of_B, owners, C, of_C, size, blocks):
    """C[m] = silu(A[m] gate^T) * (A[m] up^T) of the owner of m; in float8 `of_C` has its scales, as `of_A` those of A.

    The grid is persistent: a block loads the weights of its next tile while it stores this one.
    """
    N, tiles = int(C.shape[1]), owners.shape[0]
    columns = -(-N // WIDE)
    with launch(size, blocks) as block:
        c, c_up = (T.alloc((WIDE, ROWS), "float32", level="l0") for _ in range(2))
        out = T.alloc((ROWS, WIDE), C.dtype, level="l1")
        for iteration in T.serial(iterations_of(block, blocks, columns * tiles)):
            tile, column = (block + iteration * blocks) // columns, (block + iteration * blocks) % columns
            if owners[tile] >= 0:
                expert = T.max(T.min(owners[tile], B.shape[0] - 1), 0)
                T.clear(c)
                T.clear(c_up)
                if C.dtype == WIRE:
                    multiply_scaled(A, of_A, tile, B, of_B, expert, column * WIDE, N + column * WIDE, c, c_up)
                else:
                    multiply(A, tile, B, expert, column * WIDE, N + column * WIDE, c, c_up)
                swiglu(c, c_up)
                if C.dtype == WIRE:
                    turned = T.alloc((ROWS, WIDE), "float32", level="l1")
                    x, sizes = (T.alloc((ROWS, WIDE), kind, level="l0") for kind in ("float32", "int32"))
                    top, q = T.alloc((ROWS,), "int32", level="l0"), T.alloc((ROWS, WIDE), WIRE, level="l0")
                    scale, inverse, end = (T.alloc((ROWS,), "float32", level="l0") for _ in range(3))
                    for i, j in T.Parallel(WIDE, ROWS):
                        turned[j, i] = c[i, j]
                    T.copy(turned, x)
                    quantize(x, sizes, top, scale, inverse, end, q, last_of("float32"))
                    T.copy(q, out)
                    for j in T.Parallel(ROWS):
                        of_C[column, tile * ROWS + j] = scale[j]
                else:
                    for i, j in T.Parallel(WIDE, ROWS):
                        out[j, i] = c[i, j]
                T.copy(out, C[tile * ROWS, column * WIDE])


@T.macro
def few_grid(A, of_A, B, of_B, owners, C, size, blocks):
    """C[m] = A[m] B[owner of m]^T; tiles without a token are skipped. A persistent grid, two squares in each tile."""
    N, tiles = int(C.shape[1]), owners.shape[0]
    columns = -(-N // (2 * WIDE))
    with launch(size, blocks) as block:
        c, c_second = (T.alloc((WIDE, ROWS), "float32", level="l0") for _ in range(2))
        out = T.alloc((ROWS, 2 * WIDE), C.dtype, level="l1")
        for iteration in T.serial(iterations_of(block, blocks, columns * tiles)):
            tile, column = (block + iteration * blocks) // columns, (block + iteration * blocks) % columns * 2 * WIDE
            if owners[tile] >= 0:
                expert = T.max(T.min(owners[tile], B.shape[0] - 1), 0)
                T.clear(c)
                T.clear(c_second)
                if A.dtype == WIRE:
                    multiply_scaled(A, of_A, tile, B, of_B, expert, column, column + WIDE, c, c_second)
                else:
                    multiply(A, tile, B, expert, column, column + WIDE, c, c_second)
                for i, j in T.Parallel(WIDE, ROWS):
                    out[j, i] = c[i, j]
                for i, j in T.Parallel(WIDE, ROWS):
                    out[j, WIDE + i] = c_second[i, j]
                T.copy(out, C[tile * ROWS, column])
