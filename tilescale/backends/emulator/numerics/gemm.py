# SPDX-License-Identifier: MIT
"""GEMMs of tiles: dense, 2:4 sparse and block scaled, in place on the accumulator.

Floats multiply exactly and add in float32 (float64 for float64), integers are exact modulo the accumulator's width.
"""

from __future__ import annotations

import numpy as np
import torch

from tilescale.backends.emulator.numerics import dtypes
from tilescale.errors import ShapeError, UnsupportedError

_F32, _F64, _I64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)


def gemm(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    clear: bool = False,
    tf32: bool = True,
) -> None:
    """c += a @ b, or c = a @ b with `clear`; c may be any strided view and keeps its type.

    Shapes: a (M, K), b (K, N), c (M, N), before the transposes. Narrow floats widen to float32; float32 operands lose
    their low 13 bits if `tf32` (tensor cores); a float16 accumulator is computed in float32 and rounded once. Integer
    operands with an integer accumulator wrap as the hardware does. Raises ShapeError: the three shapes do not fit.
    """
    if transpose_a:
        a = a.T
    if transpose_b:
        b = b.T
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or c.shape != (a.shape[0], b.shape[1]):
        raise ShapeError(f"gemm: A {a.shape} times B {b.shape} into C {c.shape}, after transposing")
    if c.dtype.kind in "iu":
        _integer_gemm(a, b, c, clear)
        return
    wide = _F64 if c.dtype == _F64 else _F32
    left, right = (_operand(x, wide, tf32) for x in (a, b))
    if c.dtype == wide and c.flags.writeable and min(c.strides) >= 0:
        out = torch.from_numpy(c)
        torch.addmm(out, _tensor(left), _tensor(right), beta=0 if clear else 1, out=out)
        return
    product = _matmul(left, right)
    c[...] = dtypes.convert(product if clear else product + dtypes.convert(c, wide), c.dtype)


def _operand(x: np.ndarray, wide: np.dtype, tf32: bool) -> np.ndarray:
    if x.dtype == _F32 and wide == _F32:
        return dtypes.tf32(x) if tf32 else x
    return dtypes.convert(x, wide)


def _tensor(x: np.ndarray) -> torch.Tensor:
    # torch neither takes negative strides nor (without a warning) read-only memory.
    return torch.from_numpy(x if x.flags.writeable and min(x.strides) >= 0 else x.copy())


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return torch.mm(_tensor(a), _tensor(b)).numpy()


def _integer_gemm(a: np.ndarray, b: np.ndarray, c: np.ndarray, clear: bool) -> None:
    """Exact through floating-point BLAS: K is cut so that no partial sum leaves the mantissa."""
    if dtypes.is_float(a.dtype) or dtypes.is_float(b.dtype):
        raise UnsupportedError(f"gemm: A {a.dtype} and B {b.dtype} with the integer accumulator {c.dtype}")
    largest = _largest(a.dtype) * _largest(b.dtype)
    wide, step = (_F32, 2**24 // largest) if largest <= 2**18 else (_F64, 2**53 // largest)
    if step == 0:
        product = dtypes.convert(a, _I64) @ dtypes.convert(b, _I64)
        c[...] = (product if clear else product + c).astype(c.dtype)
        return
    left, right = dtypes.convert(a, wide), dtypes.convert(b, wide)
    if clear:
        c[...] = 0
    for start in range(0, a.shape[1], step):
        part = _matmul(left[:, start : start + step], right[start : start + step])
        c += part.astype(_I64).astype(c.dtype)


def _largest(dtype: np.dtype) -> int:
    bits = {"int4": 4, "uint4": 4, "bool": 1}.get(dtype.name, 8 * dtype.itemsize)
    return 2 ** (bits - 1) if dtype.name.startswith("int") else 2**bits - 1


def gemm_sparse(
    a: np.ndarray,
    metadata: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    transpose_a: bool = False,
    transpose_metadata: bool = False,
    transpose_b: bool = False,
    clear: bool = False,
    tf32: bool = True,
) -> None:
    """c += dense(a, metadata) @ b for `T.gemm_sp`; shapes a (M, K/2), metadata as `decompress_2to4`, b (K, N)."""
    dense = decompress_2to4(a.T if transpose_a else a, metadata.T if transpose_metadata else metadata)
    gemm(dense, b, c, transpose_b=transpose_b, clear=clear, tf32=tf32)


def decompress_2to4(a: np.ndarray, metadata: np.ndarray) -> np.ndarray:
    """The dense (M, K) matrix of a compressed (M, K/2) one, in its type.

    Metadata is TileLang's logical one, (M, K * 4 / (group * bits)) integers of any width: four bits per group, lowest
    bits first. A group is four elements of which two are kept, and the bits hold their two positions (PTX ISA,
    `mma.sp`); for 4-byte elements it is two of which one is kept, 0b0100 for the first and 0b1110 for the second. The
    caller undoes a physical order given with `T.annotate_layout` (CUTLASS for sm_80, sm_90). Raises ShapeError: the two
    shapes do not describe one matrix.
    """
    kept, group = (1, 2) if a.dtype.itemsize == 4 else (2, 4)
    rows, groups = a.shape[0], a.shape[1] // kept
    nibbles = np.ascontiguousarray(metadata).view(np.uint8)
    if a.shape[1] % kept or nibbles.shape != (rows, groups // 2) or groups % 2:
        raise ShapeError(f"gemm_sp: A {a.shape} of {a.dtype} with metadata {metadata.shape} of {metadata.dtype}")
    codes = np.stack((nibbles & 15, nibbles >> 4), axis=-1).reshape(rows, groups)
    places = (codes & 2)[..., None] >> 1 if kept == 1 else np.stack((codes & 3, codes >> 2), axis=-1)
    dense = np.zeros((rows, groups, group), a.dtype)
    # Bits, not values: put_along_axis copies any type of that size.
    bits = np.dtype(f"u{a.dtype.itemsize}")
    values = np.ascontiguousarray(a).view(bits).reshape(rows, groups, kept)
    target = dense.view(bits)
    for slot in range(kept - 1, -1, -1):
        # Compressors give an absent second value position 0 and the value there again: the first slot must win.
        np.put_along_axis(target, places[..., slot : slot + 1].astype(np.intp), values[..., slot : slot + 1], axis=-1)
    return dense.reshape(rows, groups * group)


def gemm_blockscaled(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    *,
    k_start: int,
    granularity_a: int,
    granularity_b: int,
    transpose_a: bool = False,
    transpose_b: bool = False,
    clear: bool = False,
) -> None:
    """c += (a * scale_a) @ (b * scale_b) for `T.gemm_blockscaled`, float32 accumulation.

    Logical scales: scale_a (M, blocks), scale_b (N, blocks), e8m0 or e4m3, where column (k_start + k) // granularity
    covers element k of the tile. The caller unpacks four scales from a 32-bit word and undoes their order in tensor
    memory, which is not part of the logical buffer. Raises ShapeError: the scales do not cover the tile.
    """
    left = dtypes.convert(a.T if transpose_a else a, _F32)
    right = dtypes.convert(b.T if transpose_b else b, _F32)
    scaled_a = left * _scale_columns(scale_a, left.shape[0], left.shape[1], k_start, granularity_a)
    scaled_b = right * _scale_columns(scale_b, right.shape[1], right.shape[0], k_start, granularity_b).T
    gemm(scaled_a, scaled_b, c, clear=clear, tf32=False)


def _scale_columns(scale: np.ndarray, rows: int, depth: int, k_start: int, granularity: int) -> np.ndarray:
    columns = (k_start + np.arange(depth)) // granularity
    if scale.shape[0] != rows or columns[-1] >= scale.shape[1]:
        raise ShapeError(f"gemm_blockscaled: scales {scale.shape} for {rows} rows and K blocks up to {columns[-1]}")
    return dtypes.convert(scale, _F32)[:, columns]
