# SPDX-License-Identifier: MIT
"""Scalar functions of TIR and TileLang by operator name, on numpy arrays, numpy scalars and Python numbers.

`INTRINSICS[op_name](*arguments, dtype=result_type)`. Half and narrower types compute in float32 and round once. The
fast variants (`tl.__exp`, `tl.fast_rcp`, ...) give the accurate result: their hardware error is not modelled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilelang_core import tl
from tilescale.backends.emulator.numerics import dtypes, elementwise, ieee

_F32, _F64, _U64, _I32 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.uint64), np.dtype(np.int32)


def _compute(x: Any) -> Any:
    """A float argument in the type to compute in."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x if x.dtype == _F64 else dtypes.convert(x, _F32)
    return np.float64(x)


def _float_function(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*arguments: Any, dtype: np.dtype) -> Any:
        return dtypes.convert(function(*map(_compute, arguments)), dtype)

    return apply


def _predicate(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, *, dtype: function(_compute(x))


def _elementwise(function: Callable[[Any, Any, np.dtype], Any]) -> Callable[..., Any]:
    return lambda a, b, *, dtype: function(a, b, dtype)


def _rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """ieee_*: the last argument is the mode, a string."""
    return lambda *arguments, dtype: function(*arguments[:-1], str(arguments[-1]), dtype)


def _nearest(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, dtype: function(*arguments, "rn", dtype)


def _erf(x: Any) -> Any:
    return torch.erf(torch.from_numpy(np.array(x))).numpy()[()]


def _round_away(x: Any) -> Any:
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x)


def _wide_type(dtype: np.dtype) -> np.dtype:
    return _F32 if dtypes.is_float(dtype) and dtype.itemsize < 4 else dtype


def _absolute(x: Any, *, dtype: np.dtype) -> Any:
    return dtypes.convert(np.abs(dtypes.convert(x, _wide_type(dtype))), dtype)


def _identity(x: Any, *, dtype: np.dtype) -> Any:
    return x


def _clamp(x: Any, low: Any, high: Any, *, dtype: np.dtype) -> Any:
    """`T.clamp`: NaN in any argument gives NaN; `high` wins over `low`."""
    x, low, high = (dtypes.convert(v, _wide_type(dtype)) for v in (x, low, high))
    return dtypes.convert(np.minimum(np.maximum(x, low), high), dtype)


def _power_of_int(x: Any, exponent: Any, *, dtype: np.dtype) -> Any:
    if dtypes.is_float(dtype):
        return dtypes.convert(_compute(x) ** int(exponent), dtype)
    return dtypes.convert(x, dtype) ** dtype.type(int(exponent))


# -- bits -----------------------------------------------------------------------------------------------------------


def _unsigned(x: Any) -> tuple[np.ndarray, int]:
    """The bit patterns of integers, and their width: for Python ints 32 if that holds them, else 64."""
    if type(x) is int:
        x = dtypes.convert(x, _I32 if -(2**31) <= x < 2**32 else _U64)
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}"), 8 * array.dtype.itemsize


def _popcount(x: Any, *, dtype: np.dtype) -> Any:
    return dtypes.convert(np.bitwise_count(_unsigned(x)[0]), dtype)[()]


def _bit_length(bits: np.ndarray) -> np.ndarray:
    wide = bits.astype(_U64)
    high = wide >> np.uint64(32)
    half = np.where(high != 0, high, wide).astype(_F64)  # 32 bits are exact in a float64
    return np.frexp(half)[1] + np.where(high != 0, 32, 0)


def _leading_zeros(x: Any, *, dtype: np.dtype) -> Any:
    bits, width = _unsigned(x)
    return dtypes.convert(width - _bit_length(bits), dtype)[()]


def _find_first_set(x: Any, *, dtype: np.dtype) -> Any:
    """CUDA's __ffs: the position of the lowest set bit, from 1; 0 if none is set."""
    bits, _ = _unsigned(x)
    return dtypes.convert(_bit_length(bits & (~bits + bits.dtype.type(1))), dtype)[()]


def _find_nth_set(mask: Any, base: Any, offset: Any, *, dtype: np.dtype) -> Any:
    """CUDA's __fns: the offset-th set bit at or above `base` (at or below if negative), 0xFFFFFFFF if there is none."""
    mask, base, offset = np.broadcast_arrays(*(np.asarray(v).astype(np.int64) for v in (mask, base, offset)))
    place = np.arange(32)
    is_set = (mask[..., None] >> place) & 1 == 1
    up = is_set & (place >= base[..., None])
    down = (is_set & (place <= base[..., None]))[..., ::-1]
    wanted = np.maximum(np.abs(offset), 1)[..., None]
    upward = (offset >= 0)[..., None]
    found = np.where(upward, up, down)
    hit = found & (np.cumsum(found, axis=-1) == wanted)
    index = np.argmax(hit, axis=-1)
    index = np.where(offset >= 0, index, 31 - index)
    valid = hit.any(axis=-1) & ((offset != 0) | (index == base))
    return dtypes.convert(np.where(valid, index, 0xFFFFFFFF), dtype)[()]


def _invert(x: Any, *, dtype: np.dtype) -> Any:
    if dtype.kind == "b":
        return np.logical_not(x)
    return dtypes.wrap(~x, dtype) if type(x) is int else ~dtypes.convert(x, dtype)


def _reinterpret(x: Any, *, dtype: np.dtype) -> Any:
    """The bits of a numpy value as `dtype`; Python numbers count as int32 and float32."""
    if not isinstance(x, (np.ndarray, np.generic)):
        x = dtypes.convert(x, _F32 if isinstance(x, float) else _I32)
    return np.asarray(x).view(dtype)[()]


def _pack(*parts: Any, dtype: np.dtype) -> Any:
    """`parts`, the first lowest, packed in one integer."""
    patterns = [_unsigned(np.asarray(p)) for p in parts]
    word = functools.reduce(operator.or_, (b.astype(_U64) << np.uint64(i * w) for i, (b, w) in enumerate(patterns)))
    return dtypes.convert(word, dtype)[()]


def _large_uint(low: Any, high: Any, *, dtype: np.dtype) -> Any:
    return dtypes.convert((int(high) << 32) | int(low), dtype)


def _dp4a(a: Any, b: Any, c: Any, *, dtype: np.dtype) -> Any:
    """c + the dot product of four signed bytes: int8 arrays with a last axis of 4, or int32 words of four bytes."""
    a, b = (_bytes_of_words(v).astype(_I32) for v in (a, b))
    return dtypes.convert(np.add(np.sum(a * b, axis=-1, dtype=_I32), dtypes.convert(c, _I32)), dtype)


def _bytes_of_words(x: Any) -> np.ndarray:
    array = np.asarray(x if not isinstance(x, int) else dtypes.convert(x, _I32))
    return array if array.dtype.itemsize == 1 else np.ascontiguousarray(array)[..., None].view(np.int8)


def _infinity(*_: Any, dtype: np.dtype) -> Any:
    return dtypes.convert(float("inf"), dtype)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


_UNARY: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": _erf,
    "sigmoid": _sigmoid,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "nearbyint": np.rint,
}
_BINARY_FLOAT: dict[str, Callable[..., Any]] = {
    "pow": np.power,
    "fmod": np.fmod,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "copysign": np.copysign,
    "ldexp": lambda x, n: np.ldexp(x, n.astype(_I32)),
}
_FAST = ("exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan")

INTRINSICS: dict[str, Callable[..., Any]] = {
    **{tl.TIR + name: _float_function(function) for name, function in {**_UNARY, **_BINARY_FLOAT}.items()},
    **{tl.FAST + name: _float_function(_UNARY[name]) for name in _FAST},
    tl.NEXTAFTER: lambda a, b, *, dtype: np.nextafter(dtypes.convert(a, dtype), dtypes.convert(b, dtype)),
    tl.FABS: _absolute,
    tl.ISNAN: _predicate(np.isnan),
    tl.ISINF: _predicate(np.isinf),
    tl.ISFINITE: _predicate(np.isfinite),
    tl.LIKELY: _identity,
    tl.TIR_FMA: _nearest(ieee.fma),
    tl.BITWISE_AND: _elementwise(elementwise.bitwise(operator.and_)),
    tl.BITWISE_OR: _elementwise(elementwise.bitwise(operator.or_)),
    tl.BITWISE_XOR: _elementwise(elementwise.bitwise(operator.xor)),
    tl.BITWISE_NOT: _invert,
    tl.SHIFT_LEFT: _elementwise(elementwise.shift_left),
    tl.SHIFT_RIGHT: _elementwise(elementwise.shift_right),
    tl.POPCOUNT: _popcount,
    tl.CLZ: _leading_zeros,
    tl.REINTERPRET: _reinterpret,
    tl.LARGE_UINT_IMM: _large_uint,
    tl.DP4A: _dp4a,
    tl.FFS: _find_first_set,
    tl.FNS: _find_nth_set,
    tl.LDG: _identity,
    tl.POW_OF_INT: _power_of_int,
    tl.ROUND_TIES_AWAY_FROM_ZERO: _float_function(_round_away),
    tl.FAST_RCP: _float_function(lambda x: 1 / x),
    tl.INFINITY: _infinity,
    tl.CLAMP: _clamp,
    tl.MAX_NAN: _float_function(np.maximum),
    tl.MIN_NAN: _float_function(np.minimum),
    tl.PACK_B16: _pack,
    tl.PACK_B8X4: _pack,
    tl.FMA: _nearest(ieee.fma),
    tl.FMUL: _elementwise(elementwise.multiply),
    tl.IEEE_ADD: _rounded(ieee.add),
    tl.IEEE_SUB: _rounded(ieee.subtract),
    tl.IEEE_MUL: _rounded(ieee.multiply),
    tl.IEEE_FMAF: _rounded(ieee.fma),
    tl.IEEE_FDIV: _rounded(ieee.divide),
    tl.IEEE_FRCP: _rounded(ieee.reciprocal),
    tl.IEEE_FSQRT: _rounded(ieee.sqrt),
    tl.IEEE_FRSQRT: lambda x, *, dtype: dtypes.convert(1 / np.sqrt(dtypes.convert(x, _F64)), dtype),
    # Packed pairs: lanes are elements like any others.
    tl.ADD2: _elementwise(elementwise.add),
    tl.SUB2: _elementwise(elementwise.subtract),
    tl.MUL2: _elementwise(elementwise.multiply),
    tl.MAX2: _elementwise(elementwise.maximum),
    tl.MIN2: _elementwise(elementwise.minimum),
    tl.MAX2_NAN: _float_function(np.maximum),
    tl.MIN2_NAN: _float_function(np.minimum),
    tl.FMA2: _nearest(ieee.fma),
    tl.ABS2: _absolute,
}
