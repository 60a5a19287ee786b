# SPDX-License-Identifier: MIT
"""Reductions and scans along one dimension, and element-wise reduction of many arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilescale.backends.emulator.numerics import dtypes
from tilescale.errors import ShapeError, UnsupportedError

_F32 = np.dtype(np.float32)
# fmax and fmin return the operand that is not NaN, as CUDA's fmaxf, fminf, __hmax and __hmin do.
_UFUNCS = {
    "sum": np.add,
    "max": np.fmax,
    "min": np.fmin,
    "prod": np.multiply,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
}
_BASE_OF = {"abssum": "sum", "absmax": "max", "cumsum": "sum", "cummax": "max"}
_PROPAGATING = {"max": np.maximum, "min": np.minimum}


def combine_ufunc(op: str, nan_propagate: bool = False) -> np.ufunc:
    """The ufunc that combines two partial results of `op`: sum, max, min, prod, bitand, bitor, bitxor, abs.., cum..."""
    base = _BASE_OF.get(op, op)
    ufunc = {**_UFUNCS, **(_PROPAGATING if nan_propagate else {})}.get(base)
    if ufunc is None:
        raise UnsupportedError(f"unknown reduction {op!r}", hint="one of " + ", ".join([*_UFUNCS, *_BASE_OF]))
    return ufunc


def identity(op: str, dtype: np.dtype) -> np.generic:
    """The value that `op` starts from in `dtype`: what TileLang initialises the destination with."""
    base = _BASE_OF.get(op, op)
    if op == "absmax" or base in ("sum", "bitor", "bitxor"):
        return dtypes.convert(0, dtype)
    if base == "prod":
        return dtypes.convert(1, dtype)
    if base == "bitand":
        return dtypes.convert(-1, dtype)
    if dtypes.is_float(dtype):
        return dtypes.convert(float("-inf") if base == "max" else float("inf"), dtype)
    info = np.iinfo(dtype) if dtype.kind in "iu" else None
    if info is None:
        return dtype.type(base != "max")
    return dtype.type(info.min if base == "max" else info.max)


def reduce(
    src: np.ndarray, dst: np.ndarray, kind: str, dim: int, clear: bool = True, *, nan_propagate: bool = False
) -> None:
    """dst = kind(src along dim), combined with dst's old values unless `clear`; dst lacks the dimension or has it as 1.

    kind: sum, abssum, max, absmax, min, bitand, bitor, bitxor. TileLang casts each element to dst's type and
    accumulates there; here narrow floats accumulate in float32 and round once, integers wrap in dst's type. max and min
    skip NaN (all NaN gives the identity, an infinity) unless `nan_propagate`. Raises ShapeError: dst does not have
    src's shape without `dim`.
    """
    dim %= src.ndim
    if dst.size * src.shape[dim] != src.size:
        raise ShapeError(f"reduce_{kind}: {src.shape} along dimension {dim} into {dst.shape}")
    ufunc = combine_ufunc(kind, nan_propagate)
    values = _in_compute_type(src, dst.dtype)
    if kind.startswith("abs") and values.dtype.kind != "u":
        values = np.abs(values)
    initial = identity(kind, values.dtype)
    if ufunc is np.add:
        result = np.add.reduce(values, axis=dim, dtype=values.dtype)
    else:
        result = ufunc.reduce(values, axis=dim, initial=initial)
    result = result.reshape(dst.shape)
    if not clear:
        result = ufunc(_in_compute_type(dst, dst.dtype), result)
    dst[...] = dtypes.convert(result, dst.dtype)


def _in_compute_type(array: np.ndarray, target: np.dtype) -> np.ndarray:
    """`array` in the type to accumulate in for a result in `target`."""
    if dtypes.is_float(target):
        return dtypes.convert(array, target if target.itemsize == 8 else _F32)
    return dtypes.convert(array, target)


def scan(src: np.ndarray, dst: np.ndarray, kind: str, dim: int = 0, reverse: bool = False) -> None:
    """Inclusive scan of src along dim into dst (which may be src): "cumsum" or "cummax", from the end if `reverse`.

    Narrow floats accumulate in float32 and round each result once; cummax skips NaN and starts from -infinity.
    """
    if src.shape != dst.shape:
        raise ShapeError(f"{kind}: source {src.shape} and destination {dst.shape} differ")
    if kind not in ("cumsum", "cummax"):
        raise UnsupportedError(f"unknown scan {kind!r}", hint="one of cumsum, cummax")
    values = _in_compute_type(src, dst.dtype)
    ufunc = combine_ufunc(kind)
    if reverse:
        values, dst = np.flip(values, dim), np.flip(dst, dim)
    if ufunc is np.fmax and dtypes.is_float(values.dtype):
        values = np.fmax(values, identity("max", values.dtype))
    dst[...] = dtypes.convert(ufunc.accumulate(values, axis=dim, dtype=values.dtype), dst.dtype)


def reduce_many(arrays: Sequence[np.ndarray], op: str, out_dtype: np.dtype) -> np.ndarray:
    """Element-wise `op` (sum, max, min, prod, bit...) over equally shaped arrays, for collectives: a new array.

    Narrow floats accumulate in float32 in the order given and round once to `out_dtype`; integers wrap. Maximum and
    minimum propagate NaN.
    """
    ufunc = combine_ufunc(op, nan_propagate=True)
    total = np.array(_in_compute_type(arrays[0], out_dtype))
    for array in arrays[1:]:
        ufunc(total, _in_compute_type(array, out_dtype), out=total)
    return dtypes.convert(total, out_dtype)
