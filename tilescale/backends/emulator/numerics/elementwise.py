# SPDX-License-Identifier: MIT
"""Binary operators and select of TIR: on Python ints and floats, numpy scalars and arrays, in a given result type.

Operands have the type of the expression already, as TIR has no implicit conversions. Integers wrap at their width;
narrow floats compute in float32 and round once, which gives the correctly rounded result for + - * /.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tilescale.backends.emulator.numerics import dtypes
from tilescale.backends.emulator.numerics.dtypes import wrap

_F32 = np.dtype(np.float32)


def _compute_type(dtype: np.dtype) -> np.dtype:
    return _F32 if dtypes.is_float(dtype) and dtype.itemsize < 4 else dtype


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any, np.dtype], Any]:
    def apply(a: Any, b: Any, dtype: np.dtype) -> Any:
        if type(a) is int and type(b) is int and dtype.kind in "iu":
            return wrap(function(a, b), dtype)
        wide = _compute_type(dtype)
        return dtypes.convert(function(dtypes.convert(a, wide), dtypes.convert(b, wide)), dtype)

    return apply


add = _arithmetic(operator.add)
subtract = _arithmetic(operator.sub)
multiply = _arithmetic(operator.mul)


def _integer_pair(a: Any, b: Any, dtype: np.dtype) -> tuple[Any, Any]:
    return dtypes.convert(a, dtype), dtypes.convert(b, dtype)


def divide(a: Any, b: Any, dtype: np.dtype) -> Any:
    """TIR's Div: IEEE division of floats, integer division toward zero.

    An integer x / 0, which CUDA leaves undefined without trapping, is 0 here, and x mod 0 is x.
    """
    if dtypes.is_float(dtype):
        return _divide_floats(a, b, dtype)
    if type(a) is int and type(b) is int:
        quotient = abs(a) // abs(b) if b else 0
        return wrap(quotient if (a < 0) == (b < 0) else -quotient, dtype)
    a, b = _integer_pair(a, b, dtype)
    quotient = np.floor_divide(a, b)
    if dtype.kind == "u":
        return quotient
    return quotient + ((a - quotient * b != 0) & ((a ^ b) < 0) & (b != 0))


_divide_floats = _arithmetic(operator.truediv)


def mod(a: Any, b: Any, dtype: np.dtype) -> Any:
    """TIR's Mod: the remainder of division toward zero, with the sign of `a`; C's fmod for floats."""
    if dtypes.is_float(dtype):
        return _fmod_floats(a, b, dtype)
    return subtract(a, multiply(divide(a, b, dtype), b, dtype), dtype)


_fmod_floats = _arithmetic(np.fmod)


def floor_divide(a: Any, b: Any, dtype: np.dtype) -> Any:
    """Integer division toward minus infinity."""
    if type(a) is int and type(b) is int:
        return wrap(a // b, dtype) if b else 0
    return np.floor_divide(*_integer_pair(a, b, dtype))


def floor_mod(a: Any, b: Any, dtype: np.dtype) -> Any:
    """The remainder of `floor_divide`, with the sign of `b`."""
    if type(a) is int and type(b) is int:
        return a % b if b else a
    # Not np.mod: floor_divide by a scalar is many times faster.
    return subtract(a, multiply(floor_divide(a, b, dtype), b, dtype), dtype)


def _extremum(ufunc: np.ufunc, builtin: Callable[[Any, Any], Any]) -> Callable[[Any, Any, np.dtype], Any]:
    def apply(a: Any, b: Any, dtype: np.dtype) -> Any:
        """CUDA's fmaxf and fminf: NaN only if both operands are."""
        if type(a) is int and type(b) is int:
            return builtin(a, b)
        wide = _compute_type(dtype)
        return dtypes.convert(ufunc(dtypes.convert(a, wide), dtypes.convert(b, wide)), dtype)

    return apply


maximum = _extremum(np.fmax, max)
minimum = _extremum(np.fmin, min)


def bitwise(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any, np.dtype], Any]:
    """The operator `function` (operator.and_, or_ or xor) on integers or bools of one type."""

    def apply(a: Any, b: Any, dtype: np.dtype) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return function(a, b)
        return function(*_integer_pair(a, b, dtype))

    return apply


def shift_left(a: Any, b: Any, dtype: np.dtype) -> Any:
    """a << b; shifts by the width or more give 0, as PTX's `shl`."""
    if type(a) is int and type(b) is int:
        return wrap(a << b, dtype) if 0 <= b < 8 * dtype.itemsize else 0
    return np.left_shift(*_integer_pair(a, b, dtype))


def shift_right(a: Any, b: Any, dtype: np.dtype) -> Any:
    """a >> b, filled with the sign of signed types; shifts by the width or more leave only that, as PTX's `shr`."""
    if type(a) is int and type(b) is int:
        return a >> b if b >= 0 else (-1 if a < 0 else 0)
    return np.right_shift(*_integer_pair(a, b, dtype))


def select(condition: Any, a: Any, b: Any, dtype: np.dtype) -> Any:
    """`a` where `condition`, else `b`, in `dtype`; a scalar condition returns the operand itself."""
    if not isinstance(condition, np.ndarray):
        return a if condition else b
    return np.where(condition, dtypes.convert(a, dtype), dtypes.convert(b, dtype))


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any, np.dtype], Any]:
    def apply(a: Any, b: Any, dtype: np.dtype) -> Any:
        return function(_comparable(a), _comparable(b))

    return apply


def _comparable(x: Any) -> Any:
    # Comparing narrow floats element by element costs more than widening them.
    narrow = isinstance(x, np.ndarray) and x.dtype.itemsize < 4 and dtypes.is_float(x.dtype)
    return dtypes.convert(x, _F32) if narrow else x


def _logical(python: Callable[[Any, Any], bool], ufunc: np.ufunc) -> Callable[[Any, Any, np.dtype], Any]:
    def apply(a: Any, b: Any, dtype: np.dtype) -> Any:
        return ufunc(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else python(a, b)

    return apply


# Keyed by the class names of TIR's nodes; called with (a, b, dtype of the result).
BINARY: dict[str, Callable[[Any, Any, np.dtype], Any]] = {
    "Add": add,
    "Sub": subtract,
    "Mul": multiply,
    "Div": divide,
    "Mod": mod,
    "FloorDiv": floor_divide,
    "FloorMod": floor_mod,
    "Min": minimum,
    "Max": maximum,
    "EQ": _comparison(operator.eq),
    "NE": _comparison(operator.ne),
    "LT": _comparison(operator.lt),
    "LE": _comparison(operator.le),
    "GT": _comparison(operator.gt),
    "GE": _comparison(operator.ge),
    "And": _logical(lambda a, b: bool(a) and bool(b), np.logical_and),
    "Or": _logical(lambda a, b: bool(a) or bool(b), np.logical_or),
}
