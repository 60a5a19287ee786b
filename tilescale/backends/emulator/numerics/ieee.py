# SPDX-License-Identifier: MIT
"""Float arithmetic in the four IEEE rounding modes, for `T.ieee_*` and fused multiply-add.

float32 results come from exact or round-to-odd float64 intermediates: rounding an odd-rounded value with at least two
spare bits is right in every mode (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilescale.backends.emulator.numerics import dtypes
from tilescale.errors import UnsupportedError

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


def add(a: Any, b: Any, mode: str, dtype: np.dtype) -> Any:
    """a + b in `dtype`; mode is rn (nearest even), rz (toward zero), ru (up) or rd (down), here and below."""
    a, b = _wide(a), _wide(b)
    return _round(_odd_sum(a, b), None, mode, dtype, a + b)


def subtract(a: Any, b: Any, mode: str, dtype: np.dtype) -> Any:
    return add(a, -_wide(b), mode, dtype)


def multiply(a: Any, b: Any, mode: str, dtype: np.dtype) -> Any:
    product = _wide(a) * _wide(b)  # exact for float32
    return _round(product, None, mode, dtype, product)


def fma(a: Any, b: Any, c: Any, mode: str, dtype: np.dtype) -> Any:
    """a * b + c in `dtype`, rounded once. float64, which has no wider type here, rounds the product too."""
    product, c = _wide(a) * _wide(b), _wide(c)
    return _round(_odd_sum(product, c), None, mode, dtype, product + c)


def divide(a: Any, b: Any, mode: str, dtype: np.dtype) -> Any:
    a, b = _wide(a), _wide(b)
    quotient = a / b
    return _round(quotient, lambda r: np.sign(a - r * b) * np.sign(b), mode, dtype, quotient)


def reciprocal(a: Any, mode: str, dtype: np.dtype) -> Any:
    return divide(1.0, a, mode, dtype)


def sqrt(a: Any, mode: str, dtype: np.dtype) -> Any:
    """The square root of a in `dtype`."""
    a = _wide(a)
    root = np.sqrt(a)
    return _round(root, lambda r: np.sign(a - r * r), mode, dtype, root)


def _wide(x: Any) -> Any:
    return dtypes.convert(x, _F64)


def _odd_sum(a: Any, b: Any) -> Any:
    """a + b rounded to odd: the sum, or if inexact its neighbour with the last bit set on the error's side."""
    total = np.asarray(a + b)
    part = total - a
    error = (a - (total - part)) + (b - part)
    fix = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(fix, np.nextafter(total, np.copysign(np.inf, error)), total)


def _round(value: Any, error_sign: Any, mode: str, dtype: np.dtype, nearest: Any) -> Any:
    """`value` in `dtype`; `error_sign(r)` is the sign of exact - r where `value` itself is not exact enough."""
    if dtype == _F64:
        if mode != "rn":
            raise UnsupportedError(f"the emulator rounds float64 to nearest only, not {mode!r}")
        return nearest
    if dtype != _F32 and mode != "rn":
        raise UnsupportedError(f"the emulator rounds {dtype} to nearest only, not {mode!r}")
    result = dtypes.convert(value, dtype)[()]
    if mode == "rn":
        return result
    wide = dtypes.convert(result, _F64)
    sign = np.sign(value - wide) if error_sign is None else error_sign(wide)
    toward = {"rz": np.zeros_like(result), "ru": np.inf, "rd": -np.inf}.get(mode)
    if toward is None:
        raise UnsupportedError(f"unknown rounding mode {mode!r}", hint="one of rn, rz, ru, rd")
    # An infinite result of finite operands overflowed: the exact value lies on its finite side.
    sign = np.where(np.isinf(wide) & np.isfinite(value), -np.sign(wide), sign)
    wrong_side = {"rz": sign * np.sign(wide) < 0, "ru": sign > 0, "rd": sign < 0}[mode]
    return np.where(wrong_side, np.nextafter(result, _F32.type(toward)), result)[()]
