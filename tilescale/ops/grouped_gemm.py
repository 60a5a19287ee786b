# SPDX-License-Identifier: MIT
"""GEMMs of the rows of each expert with its own weights, as `moe_dispatch` lays them out.

A tile of rows is of one expert, so a block looks up the expert, and multiplies as in any GEMM. The number of tiles with
rows is on the device: the trip count of a persistent loop, whose roles need a loop without conditions around its tiles.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import GEMM_TYPES, MULTIPLE, as_autocast, check_same, check_tensor, dense
from tilescale.ops.gemm_tiles import DEPTH, at_once, launch
from tilescale.ops.grouped_float8 import scaled_matmul
from tilescale.ops.kernels import call_local, local_kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.moe_route import Routing, check_routing
from tilescale.ops.moe_tables import ALIGN
from tilescale.ops.operator import operator
from tilescale.ops.persistent import iterations_of

COLUMNS = 256
"""Columns of a block's tile; half as many where they do not divide N."""

STAGES = 3
"""Pipeline stages: the result does not reuse their memory, as there is a condition around them."""


def grouped_matmul(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The rows of each expert of this rank times its weights.

    Args:
        x: (room, K), in the rows in which `moe_dispatch` gave the tokens; bfloat16, float16, or float8 with scales.
        b: (experts of this rank, K, N), contiguous or the transposes of contiguous matrices (`weight.mT`), of the type
            of x; K and N are multiples of 8. In float8 only transposes are supported, and K and N are multiples of 128.
        routing: of these tokens.
        scales: for float8: of x, (room, K / 128), and of b, (experts of this rank, K / 128, N / 128), float32.

    Returns:
        (room, N), of the type of x, bfloat16 for float8; rows without a token are undefined. It can be differentiated,
        but for float8.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
    """
    x, b = as_autocast(x, b)
    check_tensor("x", x, 2, (*GEMM_TYPES, torch.float8_e4m3fn))
    check_tensor("b", b, 3, (x.dtype,))
    check_routing(routing)
    _check_shapes(x, b, routing)
    if scales is None:
        check_tensor("x", x)
        return _operator(x, b, routing.counts, routing.owners, routing.used)
    return scaled_matmul(x, b, scales, routing.owners)


def _check_shapes(x: torch.Tensor, b: torch.Tensor, routing: Routing) -> None:
    check_same("device", "x", x, "routing", routing.counts)
    check_same("device", "b", b, "x", x)
    experts = routing.counts.shape[0]
    if x.shape[0] != routing.room:
        raise ArgumentError(f"x has {x.shape[0]} rows, routing says {routing.room}", hint="give what was dispatched")
    if b.shape[0] != experts or b.shape[1] != x.shape[1]:
        raise ArgumentError(
            f"b has shape {tuple(b.shape)}, here are {experts} experts and x has {x.shape[1]} columns",
            hint="b is (experts of this rank, K, N)",
        )
    if any(not extent or extent % MULTIPLE for extent in b.shape[1:]):
        raise ArgumentError(f"b has shape {tuple(b.shape)}", hint=f"K and N are multiples of {MULTIPLE}: pad it")


@operator("grouped_matmul")
def _operator(
    x: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, owners: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    is_transposed = b.mT.is_contiguous() and not b.is_contiguous()
    result = x.new_empty(x.shape[0], b.shape[2])
    made = local_kernel(program, 0, b.shape[2], b.shape[1], dtype_of(x), is_transposed, at_once())
    call_local(made, dense(x), dense(b.mT if is_transposed else b), owners, used, result)
    return result


@operator("grouped_outer")
def _outer(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """For each expert the transpose of its rows of x times its rows of y."""
    result = x.new_empty(counts.shape[0], x.shape[1], y.shape[1])
    made = local_kernel(outer_program, 0, counts.shape[0], x.shape[1], y.shape[1], dtype_of(x))
    call_local(made, dense(x), dense(y), counts, result)
    return result


_operator.register_fake(lambda x, b, *_: x.new_empty(x.shape[0], b.shape[2]))
_outer.register_fake(lambda x, y, counts: x.new_empty(counts.shape[0], x.shape[1], y.shape[1]))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, b, counts, owners, used = ctx.saved_tensors
    dx = _operator(grad, b.mT, counts, owners, used)
    # The transposes of (N, K), the layout of weights.
    db = _outer(grad, x, counts).mT
    return dx, db


_operator.register_autograd(_backward, saves="x b counts owners used")


@T.macro
def gemm_grid(A, B, owners, used, C, size, wide, transposed, blocks):
    """C[m] = A[m] B[owner of m] of the `used` tiles. `size`: see `launch`.

    A persistent grid: a block loads its next tile while it stores this one.
    """
    dtype, K, columns = A.dtype, int(A.shape[1]), -(-int(C.shape[1]) // wide)
    with launch(size, blocks) as block:
        a = T.alloc((ALIGN, DEPTH), dtype, level="l1")
        b = T.alloc((wide, DEPTH) if transposed else (DEPTH, wide), dtype, level="l1")
        c = T.alloc((ALIGN, wide), "float32", level="l0")
        out = T.alloc((ALIGN, wide), dtype, level="l1")
        for iteration in T.serial(iterations_of(block, blocks, columns * used[0])):
            tile, column = (block + iteration * blocks) // columns, (block + iteration * blocks) % columns
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, DEPTH), num_stages=STAGES):
                T.copy(A[tile * ALIGN, k * DEPTH], a)
                if transposed:
                    T.copy(B[owners[tile], column * wide, k * DEPTH], b)
                else:
                    T.copy(B[owners[tile], k * DEPTH, column * wide], b)
                T.gemm(a, b, c, transpose_B=transposed, policy=T.GemmWarpPolicy.FullRow)
            T.copy(c, out)
            T.copy(out, C[tile * ALIGN, column * wide])


def columns_of(N: int) -> int:
    """Columns of a block's tile for N columns."""
    return COLUMNS if N % COLUMNS == 0 else COLUMNS // 2


def program(size: int, N: int, K: int, dtype: str, transposed: bool, blocks: int) -> Any:
    """`gemm_grid` of N columns."""
    room, experts = T.dynamic("room"), T.dynamic("experts")

    @T.prim_func
    def grouped_matmul(
        A: T.Tensor((room, K), dtype),
        B: T.Tensor((experts, N, K) if transposed else (experts, K, N), dtype),
        owners: T.Tensor((room // ALIGN,), "int32"),
        used: T.Tensor((1,), "int32"),
        C: T.Tensor((room, N), dtype),
    ):
        gemm_grid(A, B, owners, used, C, size, columns_of(N), transposed, blocks)

    return grouped_matmul


@T.macro
def outer_grid(X, Y, counts, C, size):
    """C[e] = X[rows of e]^T Y[rows of e]: whole steps of rows, then those that are left. `size`: see `launch`.

    A block makes two adjacent tiles, for which a step of X is loaded once.
    """
    dtype, room, side = X.dtype, X.shape[0], ALIGN
    experts, M, N = (int(extent) for extent in C.shape)
    with launch(size, T.ceildiv(N, 2 * side), T.ceildiv(M, side), experts) as (bn, bm, expert):
        x, y, y_second, last_x, last_y, last_second = (T.alloc((DEPTH, side), dtype, level="l1") for _ in range(6))
        c, c_second = (T.alloc((side, side), "float32", level="l0") for _ in range(2))
        out = T.alloc((side, side), dtype, level="l1")
        first = T.alloc_var("int32", init=0)
        for e in T.serial(experts):
            if e < expert:
                first += T.ceildiv(counts[e], ALIGN) * ALIGN
        T.clear(c)
        T.clear(c_second)
        for step in T.Pipelined(counts[expert] // DEPTH, num_stages=STAGES):
            T.copy(X[first + step * DEPTH, bm * side], x)
            T.copy(Y[first + step * DEPTH, 2 * bn * side], y)
            T.copy(Y[first + step * DEPTH, (2 * bn + 1) * side], y_second)
            T.gemm(x, y, c, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(x, y_second, c_second, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
        left = counts[expert] % DEPTH
        if left > 0:
            begin = first + counts[expert] - left
            load_left(last_x, X, begin, left, bm * side, M, room)
            load_left(last_y, Y, begin, left, 2 * bn * side, N, room)
            load_left(last_second, Y, begin, left, (2 * bn + 1) * side, N, room)
            T.gemm(last_x, last_y, c, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(last_x, last_second, c_second, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
        T.copy(c, out)
        T.copy(out, C[expert, bm * side, 2 * bn * side])
        T.copy(c_second, out)
        T.copy(out, C[expert, bm * side, (2 * bn + 1) * side])


def outer_program(size: int, experts: int, M: int, N: int, dtype: str) -> Any:
    """`outer_grid`."""
    room = T.dynamic("room")

    @T.prim_func
    def grouped_outer(
        X: T.Tensor((room, M), dtype),
        Y: T.Tensor((room, N), dtype),
        counts: T.Tensor((experts,), "int32"),
        C: T.Tensor((experts, M, N), dtype),
    ):
        outer_grid(X, Y, counts, C, size)

    return grouped_outer


@T.macro
def load_left(tile, source, begin, left, column, width, room):
    """The last rows of an expert; beyond them, and beyond the last column, zeros."""
    is_whole = width % (2 * int(tile.shape[1])) == 0  # then 16 bytes are loaded at a time
    for i, j in T.Parallel(tile.shape[0], tile.shape[1]):
        value = source[T.min(begin + i, room - 1), column + j if is_whole else T.min(column + j, width - 1)]
        tile[i, j] = T.if_then_else((i < left) & (is_whole | (column + j < width)), value, T.cast(0, tile.dtype))
