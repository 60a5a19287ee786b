# SPDX-License-Identifier: MIT
"""TIR's binary operators against C semantics, for Python numbers, numpy scalars and arrays alike."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tilescale.backends.emulator.numerics import BINARY, convert, numpy_dtype, select, wrap

INTS = {name: numpy_dtype(name) for name in ("int8", "uint8", "int32", "uint32", "int64")}


def c_div(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


REFERENCE = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": c_div,
    "Mod": lambda a, b: a - c_div(a, b) * b,
    "FloorDiv": lambda a, b: a // b if b else 0,
    "FloorMod": lambda a, b: a % b if b else a,
    "Min": min,
    "Max": max,
    "LT": lambda a, b: a < b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
}


def pairs(dtype: np.dtype) -> list[tuple[int, int]]:
    """Each of the ends of a type's range, of small numbers and of some between, with each."""
    info, rng = np.iinfo(dtype), np.random.default_rng(1)
    low, high = int(info.min), int(info.max)
    ends = [low, low + 1, low // 2, high // 2, high - 1, high]
    numbers = {*ends, *range(max(low, -9), 10), *rng.integers(low, high, 8, endpoint=True, dtype=dtype).tolist()}
    return list(itertools.product(sorted(numbers), repeat=2))


@pytest.mark.parametrize("op", REFERENCE)
@pytest.mark.parametrize("name", INTS)
def test_integers(op: str, name: str):
    dtype, apply = INTS[name], BINARY[op]
    given = pairs(dtype)
    exact = [REFERENCE[op](a, b) for a, b in given]
    truth = isinstance(exact[0], bool)
    expected = exact if truth else [wrap(value, dtype) for value in exact]
    assert [apply(a, b, dtype) for a, b in given] == expected
    lefts, rights = (np.array(side, dtype) for side in zip(*given, strict=True))
    with np.errstate(all="ignore"):
        assert [int(apply(a, b, dtype)) for a, b in zip(lefts, rights, strict=True)] == expected
        result = apply(lefts, rights, dtype)
        assert result.tolist() == expected and (truth or result.dtype == dtype)
        if name == "int64":
            wide = [apply(np.array([a]), b, dtype) for a, b in given]
            assert [value for (value,) in wide] == expected


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Mod", "Min", "Max"])
def test_floats_are_correctly_rounded(name: str, op: str):
    dtype = numpy_dtype(name)
    rng = np.random.default_rng(3)
    a, b = (convert(rng.standard_normal(500), dtype) for _ in range(2))
    function = {
        "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Mod": np.fmod, "Min": np.fmin,
        "Max": np.fmax,
    }[op]  # fmt: skip
    got = BINARY[op](a, b, dtype)
    assert got.dtype == dtype
    exact = function(a.astype(np.longdouble), b.astype(np.longdouble)).astype(np.float64)
    np.testing.assert_array_equal(got.astype(np.float64), convert(exact, dtype).astype(np.float64))
    scalar = BINARY[op](float(a[0]), float(b[0]), dtype)
    assert scalar.dtype == dtype and float(scalar) == float(got[0])


def test_float_specials():
    f32 = np.dtype(np.float32)
    x, y = np.array([np.nan, 1, np.nan], np.float32), np.array([2, np.nan, np.nan], np.float32)
    assert BINARY["Max"](x, y, f32)[:2].tolist() == [2, 1] and math.isnan(BINARY["Max"](x, y, f32)[2])
    assert BINARY["Div"](1.0, 0.0, f32) == math.inf
    assert BINARY["Div"](np.float32(-1), np.float32(0), f32) == -math.inf
    e4m3 = numpy_dtype("float8_e4m3")
    big = convert(np.full(2, 400.0), e4m3)
    assert BINARY["Add"](big, big, e4m3).astype(float).tolist() == [448, 448]


def test_comparisons_of_narrow_floats():
    x = convert(np.array([1.0, 2.0, np.nan]), numpy_dtype("bfloat16"))
    one = convert(1.0, x.dtype)
    flag = np.dtype(bool)
    assert BINARY["GT"](x, one, flag).tolist() == [False, True, False]
    assert BINARY["EQ"](x, x, flag).tolist() == [True, True, False]
    assert BINARY["NE"](x, 1.0, flag).tolist() == [False, True, True]


def test_logic_and_select():
    flags = np.array([True, False])
    assert BINARY["And"](flags, True, flags.dtype).tolist() == [True, False]
    assert BINARY["Or"](0, 3, flags.dtype) is True
    dtype = np.dtype(np.float32)
    assert select(flags, 1.5, np.zeros(2, np.float32), dtype).tolist() == [1.5, 0]
    assert select(True, 1, 2, np.dtype(np.int32)) == 1


def test_wrap():
    assert [wrap(x, np.dtype(np.int8)) for x in (127, 128, -129, 256)] == [127, -128, 127, 0]
    assert wrap(-1, np.dtype(np.uint64)) == 2**64 - 1 and wrap(7, np.dtype(bool)) == 1
