# SPDX-License-Identifier: MIT
"""Scalar functions against torch, fractions and Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilescale.backends.emulator.numerics import INTRINSICS, convert, numpy_dtype, to_numpy
from tilescale.errors import UnsupportedError

F32, I32, U32 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint32)
UNARY = {
    "exp": torch.exp, "exp2": torch.exp2, "exp10": lambda x: 10.0**x, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "asinh": torch.asinh, "acosh": torch.acosh,
    "atanh": torch.atanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "floor": torch.floor, "ceil": torch.ceil,
    "trunc": torch.trunc, "round": torch.round, "nearbyint": torch.round, "fabs": torch.abs,
}  # fmt: skip
BINARY = {
    "pow": torch.pow, "fmod": torch.fmod, "atan2": torch.atan2, "hypot": torch.hypot, "copysign": torch.copysign
}  # fmt: skip
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 4e-7, "float64": 1e-15}
SINGLES = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("function", [*UNARY, *BINARY])
def test_floats(name: str, function: str):
    dtype = numpy_dtype(name)
    x = convert(np.r_[np.linspace(-8, 8, 97), np.linspace(0.01, 0.99, 33), np.inf, -np.inf, np.nan, 0.0], dtype)
    arguments = (x,) if function in UNARY else (x, x[::-1])
    reference = (UNARY | BINARY)[function](*(torch.from_numpy(v.astype(np.float64)) for v in arguments)).numpy()
    got = INTRINSICS[f"tirx.{function}"](*arguments, dtype=dtype)
    assert got.dtype == dtype and got.shape == x.shape
    with np.errstate(all="ignore"):
        expected = convert(reference, dtype).astype(np.float64)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2 * STEP[name], atol=STEP[name] / 4)
    for value in (x[3], float(x[3])):
        scalar = INTRINSICS[f"tirx.{function}"](*[value] * len(arguments), dtype=dtype)
        assert np.ndim(scalar) == 0 and scalar.dtype == dtype


def test_every_math_operator_of_tilelang_is_there():
    tvm = pytest.importorskip("tilelang").tvm
    registered = {str(name) for name in tvm.ir.Op.list_op_names()}
    assert {name for name in INTRINSICS if name not in registered} == set()
    math_names = {f"tirx.{n}" for n in [*UNARY, *BINARY]} | {f"tl.__{n}" for n in ("exp", "log2", "tan")}
    math_names |= {name for name in registered if name.startswith("tl.ieee_") or name.endswith(("2_nan", "add2"))}
    assert math_names - {"tl.simd.vadd2"} <= INTRINSICS.keys()


def test_predicates():
    x = convert(np.array([1.0, np.nan, np.inf, -np.inf]), numpy_dtype("bfloat16"))
    flag = np.dtype(bool)
    assert INTRINSICS["tirx.isnan"](x, dtype=flag).tolist() == [False, True, False, False]
    assert INTRINSICS["tirx.isinf"](x, dtype=flag).tolist() == [False, False, True, True]
    assert INTRINSICS["tirx.isfinite"](x, dtype=flag).tolist() == [True, False, False, False]
    assert INTRINSICS["tl.infinity"]("float16", dtype=np.dtype(np.float16)) == math.inf


def test_rounding_and_clamping():
    x = np.array([0.5, 1.5, -2.5, 0.49999997, 8388609.0], np.float32)
    assert INTRINSICS["tirx.round"](x, dtype=F32).tolist() == [0, 2, -2, 0, 8388609]
    assert INTRINSICS["tl.round_ties_away_from_zero"](x, dtype=F32).tolist() == [1, 2, -3, 0, 8388609]
    x = np.array([-3.0, 9.0, np.nan], np.float32)
    assert INTRINSICS["tl.clamp"](x, 0.0, 5.0, dtype=F32)[:2].tolist() == [0, 5]
    assert math.isnan(INTRINSICS["tl.clamp"](x, 0.0, 5.0, dtype=F32)[2])
    assert INTRINSICS["tl.clamp"](1.0, 3.0, 2.0, dtype=F32) == 2
    assert math.isnan(INTRINSICS["tl.max_nan"](1.0, float("nan"), dtype=F32))


def rounded(exact: Fraction, mode: str) -> float:
    """float32 in a rounding mode, from neighbours of the nearest one."""
    near = np.float32(float(exact))
    # float(exact) rounds to float64 first: try the neighbours too.
    around = sorted({float(near), float(np.nextafter(near, np.float32(-np.inf))), float(np.nextafter(near, np.inf))})
    below = [x for x in around if x == -math.inf or x != math.inf and Fraction(x) <= exact]
    above = [x for x in around if x == math.inf or x != -math.inf and Fraction(x) >= exact]
    low, high = below[-1], above[0]
    return {"ru": high, "rd": low, "rz": low if exact > 0 else high}[mode]


def exact_root(x: float, mode: str) -> float:
    scaled = Fraction(x) * 2**400
    root = math.isqrt(int(scaled)) if scaled.denominator == 1 else None
    exact = Fraction(root, 2**200)
    return rounded(exact if exact * exact == Fraction(x) else exact + Fraction(1, 2**210), mode)


@pytest.mark.parametrize("mode", ["rz", "ru", "rd"])
@given(a=SINGLES, b=SINGLES, c=SINGLES)
def test_directed_rounding(mode: str, a: float, b: float, c: float):
    x, y, z = np.float32(a), np.float32(b), np.float32(c)
    with np.errstate(all="ignore"):
        for name, exact in (
            ("add", Fraction(a) + Fraction(b)),
            ("sub", Fraction(a) - Fraction(b)),
            ("mul", Fraction(a) * Fraction(b)),
        ):
            if abs(exact) < 2**127:
                assert INTRINSICS[f"tl.ieee_{name}"](x, y, mode, dtype=F32) == rounded(exact, mode)
        if abs(fused := Fraction(a) * Fraction(b) + Fraction(c)) < 2**127:
            assert INTRINSICS["tl.ieee_fmaf"](x, y, z, mode, dtype=F32) == rounded(fused, mode)
        if b and abs(quotient := Fraction(a) / Fraction(b)) < 2**127:
            assert INTRINSICS["tl.ieee_fdiv"](x, y, mode, dtype=F32) == rounded(quotient, mode)
        if a > 0:
            assert INTRINSICS["tl.ieee_fsqrt"](x, mode, dtype=F32) == exact_root(a, mode)


def test_directed_rounding_at_overflow_and_in_other_types():
    big = np.array([3e38, -3e38], np.float32)
    largest = float(np.finfo(np.float32).max)
    assert INTRINSICS["tl.ieee_add"](big, big, "rn", dtype=F32).tolist() == [math.inf, -math.inf]
    assert INTRINSICS["tl.ieee_add"](big, big, "rz", dtype=F32).tolist() == [largest, -largest]
    assert INTRINSICS["tl.ieee_add"](big, big, "ru", dtype=F32).tolist() == [math.inf, -largest]
    third = np.float32(1 / 3)  # above 1/3
    assert INTRINSICS["tl.ieee_frcp"](np.float32(3), "ru", dtype=F32) == third
    assert INTRINSICS["tl.ieee_frcp"](np.float32(3), "rz", dtype=F32) == np.nextafter(third, np.float32(0))
    assert INTRINSICS["tl.ieee_frsqrt"](np.float32(4), dtype=F32) == 0.5
    with pytest.raises(UnsupportedError, match="rz"):
        INTRINSICS["tl.ieee_add"](1.0, 1.0, "rz", dtype=np.dtype(np.float64))


@given(a=SINGLES, b=SINGLES, c=SINGLES)
def test_fma_rounds_once(a: float, b: float, c: float):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not 2**-100 < abs(exact) < 2**127:
        return
    got = INTRINSICS["tl.fma"](np.float32(a), np.float32(b), np.float32(c), dtype=F32)
    errors = [abs(Fraction(float(x)) - exact) for x in (got, np.nextafter(got, np.inf), np.nextafter(got, -np.inf))]
    assert errors[0] == min(errors)


@pytest.mark.parametrize("name", ["uint8", "int32", "uint32", "int64", "uint64"])
@given(value=st.integers(0, 2**64 - 1) | st.integers(0, 64).map(lambda n: (1 << n) - 1))
def test_bits(name: str, value: int):
    dtype = numpy_dtype(name)
    width = 8 * dtype.itemsize
    pattern = value & (2**width - 1)
    x = convert(np.array([value, 0], np.uint64), dtype)
    assert INTRINSICS["tirx.popcount"](x, dtype=dtype).tolist() == [pattern.bit_count(), 0]
    assert INTRINSICS["tirx.clz"](x, dtype=I32).tolist() == [width - pattern.bit_length(), width]
    assert INTRINSICS["tl.__ffs"](x, dtype=I32).tolist() == [(pattern & -pattern).bit_length(), 0]
    assert int(INTRINSICS["tirx.bitwise_not"](x, dtype=dtype)[0]) & (2**width - 1) == ~pattern & (2**width - 1)
    shifted = INTRINSICS["tirx.shift_left"](x, dtype.type(3), dtype=dtype)
    assert int(shifted[0]) & (2**width - 1) == pattern << 3 & (2**width - 1)


def test_bits_of_python_ints():
    assert INTRINSICS["tirx.popcount"](-1, dtype=I32) == 32
    assert INTRINSICS["tirx.clz"](1, dtype=I32) == 31
    assert INTRINSICS["tirx.bitwise_and"](12, 10, dtype=I32) == 8
    assert INTRINSICS["tirx.shift_left"](1, 31, dtype=I32) == -(2**31)
    assert INTRINSICS["tirx.shift_left"](1, 40, dtype=I32) == 0
    assert INTRINSICS["tirx.shift_right"](-8, 1, dtype=I32) == -4
    assert INTRINSICS["tirx.bitwise_not"](0, dtype=U32) == 2**32 - 1
    assert INTRINSICS["tirx.large_uint_imm"](1, 2, dtype=np.dtype(np.uint64)) == 2**33 + 1


def test_find_nth_set():
    def fns(mask: int, base: int, offset: int) -> int:
        return int(INTRINSICS["tl.__fns"](mask, base, offset, dtype=U32))

    assert [fns(0b101100, 0, n) for n in (1, 2, 3, 4)] == [2, 3, 5, 0xFFFFFFFF]
    assert [fns(0b101100, 4, -n) for n in (1, 2, 3)] == [3, 2, 0xFFFFFFFF]
    assert [fns(0b101100, 3, 0), fns(0b101100, 4, 0)] == [3, 0xFFFFFFFF]


def test_reinterpret_and_pack():
    assert INTRINSICS["tirx.reinterpret"](np.float32(1.0), dtype=I32) == 0x3F800000
    assert INTRINSICS["tirx.reinterpret"](1.0, dtype=U32) == 0x3F800000
    halves = to_numpy(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert INTRINSICS["tl.pack_b16"](halves[0], halves[1], dtype=U32) == 0x40003F80
    assert INTRINSICS["tl.pack_b8x4"](*np.array([1, 2, 3, -1], np.int8), dtype=I32) == -0x00FCFDFF


def test_dp4a():
    a, b = np.array([[1, -2, 3, 127]], np.int8), np.array([[5, 6, -7, -128]], np.int8)
    expected = 5 - 12 - 21 - 127 * 128 + 100
    assert INTRINSICS["tirx.dp4a"](a, b, np.array([100], np.int32), dtype=I32).tolist() == [expected]
    assert INTRINSICS["tirx.dp4a"](a.view(np.int32)[0], b.view(np.int32)[0], 100, dtype=I32).tolist() == [expected]


def test_pairs_and_integer_powers():
    f16 = np.dtype(np.float16)
    x = np.array([[1.0, -2.0], [3.0, 4.0]], np.float16)
    assert INTRINSICS["tl.fma2"](x, x, x, dtype=f16).tolist() == [[2, 2], [12, 20]]
    assert INTRINSICS["tl.abs2"](x, dtype=f16).tolist() == [[1, 2], [3, 4]]
    assert INTRINSICS["tl.pow_of_int"](x, 3, dtype=f16).tolist() == [[1, -8], [27, 64]]
    assert INTRINSICS["tl.pow_of_int"](np.int32(3), 4, dtype=I32) == 81
    assert INTRINSICS["tirx.ldexp"](np.float32(1.5), 3, dtype=F32) == 12
    assert INTRINSICS["tirx.nextafter"](1.0, 2.0, dtype=F32) == np.float32(1 + 2.0**-23)
