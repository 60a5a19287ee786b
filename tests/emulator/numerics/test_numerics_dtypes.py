# SPDX-License-Identifier: MIT
"""Conversions against torch and exact references, and shared memory between torch and numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilescale.backends.emulator.numerics.dtypes import as_compute, convert, from_numpy, numpy_dtype, tf32, to_numpy
from tilescale.errors import ArgumentError, UnsupportedError

BIT_PATTERNS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)
EDGES = np.array(
    [0.0, -0.0, 1.0, -1.5, np.nan, np.inf, -np.inf, 65504, 65520, 448, 464, 465, 57344, 61440, 1e-8, 1e-40, 3e38],
    np.float32,
)
TORCH_NAMES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def floats(patterns: list[int]) -> np.ndarray:
    return np.array(patterns, np.uint32).view(np.float32)


def repeated(x: np.ndarray) -> np.ndarray:
    """`x` long enough for the vectorised paths."""
    return np.tile(x, 2048)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))
    signs = [np.signbit(x.astype(np.float64)) & ~np.isnan(x.astype(np.float64)) for x in (actual, expected)]
    np.testing.assert_array_equal(*signs)


def test_names():
    assert numpy_dtype("float8_e4m3") == np.dtype(ml_dtypes.float8_e4m3fn)
    assert numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert numpy_dtype("half") == np.float16
    for name in ("handle", "float16x2", "complex64"):
        with pytest.raises(UnsupportedError, match=name):
            numpy_dtype(name)


def test_every_scalar_name_of_tilelang_has_a_type():
    names = pytest.importorskip("tilelang.language.dtypes")._all_dtypes
    scalars = [n for n in names if not n.rpartition("x")[2].isdigit() or "x" not in n]
    assert "bfloat16" in scalars and "float16x2" not in scalars
    # float8_e3m4 and the b11 variant exist in ml_dtypes too, so nothing is missing.
    assert all(isinstance(numpy_dtype(name), np.dtype) for name in scalars)


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_and_numpy_share_memory(name: str):
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, name))
    strided = tensor.t()[1::2, ::3]
    array = to_numpy(strided)
    assert array.dtype == numpy_dtype(name) and array.shape == strided.shape
    assert array.ctypes.data == strided.data_ptr()
    back = from_numpy(array)
    assert back.data_ptr() == strided.data_ptr() and back.stride() == strided.stride() and back.dtype == tensor.dtype
    array[0, 0] = 1
    assert strided[0, 0].to(torch.float32) == 1


def test_unsupported_tensors():
    with pytest.raises(ArgumentError, match="meta"):
        to_numpy(torch.empty(1, device="meta"))
    with pytest.raises(UnsupportedError):
        from_numpy(np.zeros(2, ml_dtypes.float6_e2m3fn))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@given(patterns=BIT_PATTERNS)
def test_float_to_wide_float_as_torch(name: str, patterns: list[int]):
    with np.errstate(all="ignore"):
        for x in (floats(patterns), repeated(floats(patterns)), EDGES):
            expected = to_numpy(torch.from_numpy(x).to(getattr(torch, name)))
            assert_same(convert(x, numpy_dtype(name)), expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
@given(patterns=BIT_PATTERNS)
def test_float8_saturates(name: str, patterns: list[int]):
    limit = torch.finfo(getattr(torch, name)).max
    with np.errstate(all="ignore"):
        for x in (floats(patterns), repeated(floats(patterns)), EDGES):
            expected = to_numpy(torch.from_numpy(x).clamp(-limit, limit).to(getattr(torch, name)))
            assert_same(convert(x, numpy_dtype(name)), expected)


def test_float8_limits():
    x = np.array([449, 1e9, np.inf, -np.inf, np.nan], np.float32)
    assert convert(x, numpy_dtype("float8_e4m3"))[:4].astype(float).tolist() == [448, 448, 448, -448]
    assert np.isnan(convert(x, numpy_dtype("float8_e4m3"))[4])
    assert convert(x, numpy_dtype("float8_e5m2"))[:4].astype(float).tolist() == [448, 57344, 57344, -57344]
    assert convert(x, numpy_dtype("float4_e2m1fn")).astype(float).tolist() == [6, 6, 6, -6, 6]
    assert convert(x, numpy_dtype("float6_e2m3fn")).astype(float).tolist() == [7.5, 7.5, 7.5, -7.5, 7.5]


def test_e8m0_rounds_up():
    x = np.array([1, 1.01, -2, 0, 2.0**-127, 1.5 * 2.0**-127, 3e38, np.inf, np.nan], np.float32)
    got = convert(x, numpy_dtype("float8_e8m0fnu")).view(np.uint8)
    assert got.tolist() == [127, 128, 128, 0, 0, 1, 254, 254, 255]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16"])
def test_widening_is_exact_for_every_pattern(name: str):
    dtype = numpy_dtype(name)
    x = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    assert_same(convert(x, np.dtype(np.float32)), from_numpy(x).float().numpy())


def float_to_int_reference(x: float, bits: int, signed: bool, wide_source: bool) -> int:
    carrier = max(32, bits)
    low, high = (-(2 ** (carrier - 1)), 2 ** (carrier - 1) - 1) if signed else (0, 2**carrier - 1)
    if x != x:
        whole = 0 if carrier == 32 and not wide_source else (low if signed else 2 ** (carrier - 1))
    elif x in (float("inf"), float("-inf")):
        whole = high if x > 0 else low
    else:
        whole = min(max(int(x), low), high)
    whole &= 2**bits - 1
    return whole - 2**bits if signed and whole >> (bits - 1) else whole


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@given(value=st.floats(width=32) | st.floats(-300, 300, width=32) | st.sampled_from([2.0**31, 2.0**32, -(2.0**63)]))
def test_float_to_int(name: str, value: float):
    dtype = numpy_dtype(name)
    with np.errstate(all="ignore"):
        for source in (np.float32, np.float64):
            got = convert(np.array([value, 1.0], source), dtype)
            expected = float_to_int_reference(value, 8 * dtype.itemsize, dtype.kind == "i", source is np.float64)
            assert got.dtype == dtype and got.tolist() == [expected, 1]


@given(value=st.integers(-(2**63), 2**63 - 1))
def test_integers_wrap(value: int):
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "int4", "uint4"):
        dtype = numpy_dtype(name)
        bits = 4 if name.endswith("int4") else 8 * dtype.itemsize
        whole = value & (2**bits - 1)
        whole = whole - 2**bits if name[0] == "i" and whole >> (bits - 1) else whole
        assert int(convert(value, dtype)) == whole
        assert int(convert(np.array([value]), dtype)[0]) == whole


def test_bool_and_small_integers():
    truth = numpy_dtype("bool")
    assert convert(np.array([0.0, np.nan, -0.0, 0.1], np.float32), truth).tolist() == [False, True, False, True]
    assert convert(np.array([0, 256, -1]), truth).tolist() == [False, True, True]
    four = numpy_dtype("int4")
    assert convert(np.array([7.9, -8.2, 9.0], np.float32), four).astype(int).tolist() == [7, -8, -7]
    assert convert(convert(np.array([3, -8]), four), np.dtype(np.float32)).tolist() == [3, -8]
    assert convert(True, np.dtype(np.float16)) == 1 and convert(2.5, np.dtype(np.int32)) == 2


def test_convert_keeps_equal_types_and_scalars():
    x = np.zeros(3, np.float32)
    assert convert(x, x.dtype) is x
    assert isinstance(convert(1.1, numpy_dtype("bfloat16")), ml_dtypes.bfloat16)


def test_as_compute():
    assert as_compute(np.zeros(2, ml_dtypes.bfloat16)).dtype == np.float32
    assert as_compute(np.zeros(2, np.uint8)).dtype == np.int64
    assert as_compute(np.zeros(2, np.float64)).dtype == np.float64


@given(patterns=BIT_PATTERNS)
def test_tf32(patterns: list[int]):
    x = floats(patterns)
    np.testing.assert_array_equal(tf32(x).view(np.uint32), x.view(np.uint32) & 0xFFFFE000)
