# SPDX-License-Identifier: MIT
"""Grouped GEMMs in float8, with a scale for each 128 numbers of a row, and for each square or row of the weights.

Tensor cores add up float8 in fewer bits than float32 has. So they make the sum of 128 products alone, which is scaled
and added up in float32 (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2; so does DeepGEMM,
https://github.com/deepseek-ai/DeepGEMM). The scales of a tile's rows are consecutive in memory, and are loaded with it.

A block multiplies its rows by two squares of weights, one after the other, so it has registers for both sums and for
one of 128: the gate's and the other, or two of adjacent columns.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import check_same, check_tensor, dense, two_scales
from tilescale.ops.float8_wire import GROUP, quantize
from tilescale.ops.gemm_tiles import launch, swiglu
from tilescale.ops.kernels import call_local, local_kernel
from tilescale.ops.moe_tables import ALIGN
from tilescale.ops.operator import operator
from tilescale.ops.row_exchange import UNIT_BYTES
from tilescale.program.wire import WIRE, last_of

STAGES = 4
"""Pipeline stages: as many as fit with the result."""


def scaled_matmul(x: torch.Tensor, b: torch.Tensor, scales: Any, owners: torch.Tensor) -> torch.Tensor:
    """`grouped_matmul` in float8, with the expert of each tile of rows.

    Raises ArgumentError: unsupported scales, or a b that is not their kind.
    """
    of_x, of_b = two_scales(scales, "of x, and of b")
    check_tensor("b", b, 3, (torch.float8_e4m3fn,))
    if not b.mT.is_contiguous() or b.shape[1] % GROUP or b.shape[2] % GROUP:
        raise ArgumentError(
            f"b has shape {tuple(b.shape)} and strides {b.stride()}",
            hint=f"in float8: the transposes of contiguous matrices, K and N are multiples of {GROUP}",
        )
    squares = b.shape[1] // GROUP, b.shape[2] // GROUP
    for name, given, shape in ("scales[0]", of_x, (x.shape[0], squares[0])), ("scales[1]", of_b, (len(b), *squares)):
        check_scales(name, given, shape, x)
    return _scaled(x, b, of_x, of_b, owners)


def check_scales(name: str, scales: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Raise ArgumentError unless they are float32 numbers of this shape, on the device of x and of `like`."""
    check_tensor(name, scales, len(shape), (torch.float32,))
    check_same("device", name, scales, "x", like)
    if scales.shape != shape:
        raise ArgumentError(f"{name} has shape {tuple(scales.shape)}", hint=f"here it is {shape}")


@operator("grouped_matmul_scaled")
def _scaled(
    x: torch.Tensor, b: torch.Tensor, of_x: torch.Tensor, of_b: torch.Tensor, owners: torch.Tensor
) -> torch.Tensor:
    """The GEMMs of float8 matrices."""
    _, K, N = b.shape
    result = x.new_empty(x.shape[0], N, dtype=torch.bfloat16)
    wide = _wide(x)
    made = local_kernel(scaled_program, N, K, wide.shape[1])
    call_local(made, wide, of_x.t().contiguous(), b.mT, of_b.mT.contiguous(), owners, result)
    return result


_scaled.register_fake(lambda x, b, *_: x.new_empty(x.shape[0], b.shape[2], dtype=torch.bfloat16))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The matrix whose first columns are x: x, or the wider matrix that tokens and their scales arrived in."""
    stride = x.stride(0)
    is_front = x.stride(1) == 1 and stride % UNIT_BYTES == 0 and x.storage_offset() == 0
    if is_front and x.untyped_storage().nbytes() >= x.shape[0] * stride * x.itemsize:
        return x.as_strided((x.shape[0], stride), (stride, 1))
    return dense(x)


@T.macro
def add_scaled(c, part, row_scales, scale):
    """c += part, with scales of its rows and of the weights."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] += part[i, j] * (row_scales[i] * scale)


@T.macro
def scale_columns(c, of_B, expert, first):
    """c *= the scales of the rows of the weights, which are its columns."""
    for i, j in T.Parallel(c.shape[0], c.shape[1]):
        c[i, j] *= of_B[expert, T.min(first * GROUP + j, of_B.shape[1] - 1)]


@T.macro
def multiply_squares(A, of_A, tile, B, of_B, expert, first, second, c, c_second, stages=STAGES):
    """The GEMMs of a tile's rows with the weights of two squares of columns; a second one beyond the last is 0."""
    by_rows = len(of_B.shape) == 2
    a = T.alloc((ALIGN, GROUP), A.dtype, level="l1")
    b, b_second = (T.alloc((GROUP, GROUP), B.dtype, level="l1") for _ in range(2))
    scales, row_scales = T.alloc((ALIGN,), "float32", level="l1"), T.alloc((ALIGN,), "float32", level="l0")
    part = T.alloc((ALIGN, GROUP), "float32", level="l0")
    scale, scale_second = (T.alloc_var("float32", init=1.0) for _ in range(2))
    T.clear(c)
    T.clear(c_second)
    for k in T.Pipelined(T.ceildiv(int(B.shape[2]), GROUP), num_stages=stages):
        T.copy(A[tile * ALIGN, k * GROUP], a)
        T.copy(B[expert, first * GROUP, k * GROUP], b)
        T.copy(B[expert, second * GROUP, k * GROUP], b_second)
        T.copy(of_A[k, tile * ALIGN], scales)
        if not by_rows:
            scale = of_B[expert, first, k]
            scale_second = of_B[expert, T.min(second, int(of_B.shape[1]) - 1), k]
        T.gemm(a, b, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
        for i in T.Parallel(ALIGN):
            row_scales[i] = scales[i]
        add_scaled(c, part, row_scales, scale)
        T.gemm(a, b_second, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
        add_scaled(c_second, part, row_scales, scale_second)
    if by_rows:
        scale_columns(c, of_B, expert, first)
        scale_columns(c_second, of_B, expert, second)


@T.macro
def scaled_grid(A, of_A, B, of_B, owners, C, size):
    """C[m] = A[m] B[owner of m]^T, of the first columns of A; tiles without a token are skipped. `size`: see `launch`.

    `of_A` has a row for each 128 columns, `of_B` those of the squares, or a number for each row of B.
    """
    with launch(size, T.ceildiv(int(C.shape[1]), 2 * GROUP), owners.shape[0]) as (column, tile):
        c, c_second = (T.alloc((ALIGN, GROUP), "float32", level="l0") for _ in range(2))
        out = T.alloc((ALIGN, GROUP), C.dtype, level="l1")
        if owners[tile] >= 0:
            expert = T.max(T.min(owners[tile], B.shape[0] - 1), 0)
            multiply_squares(A, of_A, tile, B, of_B, expert, 2 * column, 2 * column + 1, c, c_second)
            T.copy(c, out)
            T.copy(out, C[tile * ALIGN, 2 * column * GROUP])
            T.copy(c_second, out)
            T.copy(out, C[tile * ALIGN, (2 * column + 1) * GROUP])


@T.macro
def scaled_gated_grid(A, of_A, B, of_B, owners, H, C, of_C, size, keeps):
    """C[m] = silu(A[m] gate^T) * (A[m] up^T) of the owner of m, in float8; `of_C` has its scales, as `of_A` has those
    of A. H has both results if it `keeps` them."""
    squares = int(C.shape[1]) // GROUP
    with launch(size, squares, owners.shape[0]) as (column, tile):
        c, c_up = (T.alloc((ALIGN, GROUP), "float32", level="l0") for _ in range(2))
        sizes, top = T.alloc((ALIGN, GROUP), "int32", level="l0"), T.alloc((ALIGN,), "int32", level="l0")
        scale, inverse, end = (T.alloc((ALIGN,), "float32", level="l0") for _ in range(3))
        q, out = T.alloc((ALIGN, GROUP), C.dtype, level="l0"), T.alloc((ALIGN, GROUP), C.dtype, level="l1")
        if owners[tile] >= 0:
            expert = T.max(T.min(owners[tile], B.shape[0] - 1), 0)
            given = A, of_A, tile, B, of_B, expert, column, squares + column, c, c_up
            multiply_squares(*given, STAGES - keeps)  # those results take the memory of a stage
            if keeps:
                kept = T.alloc((ALIGN, GROUP), H.dtype, level="l1")
                T.copy(c, kept)
                T.copy(kept, H[tile * ALIGN, column * GROUP])
                T.copy(c_up, kept)
                T.copy(kept, H[tile * ALIGN, (squares + column) * GROUP])
            swiglu(c, c_up)
            quantize(c, sizes, top, scale, inverse, end, q, last_of("float32"))
            T.copy(q, out)
            T.copy(out, C[tile * ALIGN, column * GROUP])
            for i in T.Parallel(ALIGN):
                of_C[column, tile * ALIGN + i] = scale[i]


def scaled_program(N: int, K: int, stride: int, kind: str = WIRE) -> Any:
    """`scaled_grid` of N columns, of the first K of `stride` columns of A, which is of type `kind`."""
    room, experts, squares = T.dynamic("room"), T.dynamic("experts"), (-(-N // GROUP), -(-K // GROUP))

    @T.prim_func
    def grouped_matmul_scaled(
        A: T.Tensor((room, stride), kind),
        of_A: T.Tensor((squares[1], room), "float32"),
        B: T.Tensor((experts, N, K), WIRE),
        of_B: T.Tensor((experts, *squares), "float32"),
        owners: T.Tensor((room // ALIGN,), "int32"),
        C: T.Tensor((room, N), "bfloat16"),
    ):
        scaled_grid(A, of_A, B, of_B, owners, C, 0)

    return grouped_matmul_scaled
