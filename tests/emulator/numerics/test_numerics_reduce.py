# SPDX-License-Identifier: MIT
"""Reductions and scans against float64 references."""

from __future__ import annotations

import numpy as np
import pytest

from tilescale.backends.emulator.numerics import dtypes
from tilescale.backends.emulator.numerics.reduce import combine_ufunc, identity, reduce, reduce_many, scan
from tilescale.errors import ShapeError, UnsupportedError

RNG = np.random.default_rng(11)
FLOATS = ["float32", "float16", "bfloat16", "float64"]
KINDS = {
    "sum": lambda x, d: x.sum(d),
    "abssum": lambda x, d: np.abs(x).sum(d),
    "max": lambda x, d: x.max(d),
    "absmax": lambda x, d: np.abs(x).max(d),
    "min": lambda x, d: x.min(d),
}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-12}


def random(shape: tuple[int, ...], name: str) -> np.ndarray:
    return dtypes.convert(RNG.standard_normal(shape).astype(np.float32), dtypes.numpy_dtype(name))


def exact(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_reduce(name: str, kind: str, dim: int, clear: bool, keep: bool):
    src = random((6, 64, 10), name)[:, ::2]
    shape = list(src.shape)
    shape[dim] = 1
    if not keep:
        del shape[dim]
    dst = random(tuple(shape), name)
    expected = KINDS[kind](exact(src), dim).reshape(shape)
    if not clear:
        combine = {"sum": np.add, "abssum": np.add, "min": np.minimum}.get(kind, np.maximum)
        expected = combine(expected, exact(dst))
    reduce(src, dst, kind, dim, clear)
    np.testing.assert_allclose(exact(dst), expected, rtol=TOLERANCE[name], atol=TOLERANCE[name])


def test_source_is_cast_to_an_integer_destination_first():
    dst = np.zeros(1, np.int32)
    reduce(np.array([[0.9, 0.9, 1.9]], np.float32), dst, "sum", 1)
    assert dst[0] == 1


@pytest.mark.parametrize("name", ["int8", "uint8", "int32", "uint32", "int64"])
def test_integers_wrap_and_combine_bits(name: str):
    dtype = dtypes.numpy_dtype(name)
    src = dtypes.convert(RNG.integers(0, 2**31, (4, 33)), dtype)
    for kind, ufunc in (("bitand", np.bitwise_and), ("bitor", np.bitwise_or), ("bitxor", np.bitwise_xor)):
        dst = dtypes.convert(np.full(4, 5), dtype)
        reduce(src, dst, kind, 1, clear=False)
        np.testing.assert_array_equal(dst, ufunc(ufunc.reduce(src, axis=1), dtype.type(5)))
    dst = np.zeros(4, dtype)
    reduce(src, dst, "sum", 1)
    np.testing.assert_array_equal(dst, src.astype(np.int64).sum(1).astype(dtype))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_nan(name: str):
    src = dtypes.convert(np.array([[1.0, np.nan, 3.0], [np.nan] * 3], np.float32), dtypes.numpy_dtype(name))
    dst = random((2,), name)
    reduce(src, dst, "max", 1)
    assert exact(dst).tolist() == [3, -np.inf]
    reduce(src, dst, "min", 1)
    assert exact(dst).tolist() == [1, np.inf]
    reduce(src, dst, "absmax", 1)
    assert exact(dst).tolist() == [3, 0]
    reduce(src, dst, "max", 1, nan_propagate=True)
    assert np.isnan(exact(dst)).all()


def test_reduce_to_one_element_and_bad_shapes():
    dst = np.zeros(1, np.float32)
    reduce(np.arange(8, dtype=np.float32), dst, "sum", 0)
    assert dst[0] == 28
    with pytest.raises(ShapeError, match="dimension 1"):
        reduce(np.zeros((4, 8)), np.zeros(8), "sum", 1)
    with pytest.raises(UnsupportedError, match="mean"):
        reduce(np.zeros((4, 8)), np.zeros(4), "mean", 1)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["cumsum", "cummax"])
def test_scan(name: str, reverse: bool, dim: int, kind: str):
    src = random((40, 12), name) if name != "int32" else RNG.integers(-9, 9, (40, 12)).astype(np.int32)
    wide = np.flip(exact(src), dim) if reverse else exact(src)
    expected = (np.add if kind == "cumsum" else np.maximum).accumulate(wide, axis=dim)
    expected = np.flip(expected, dim) if reverse else expected
    in_place = src.copy()
    scan(in_place, in_place, kind, dim, reverse)
    tolerance = TOLERANCE.get(name, 0)
    np.testing.assert_allclose(exact(in_place), expected, rtol=tolerance, atol=8 * tolerance)


def test_cummax_skips_nan():
    dst = np.zeros(3, np.float32)
    scan(np.array([np.nan, 2, np.nan], np.float32), dst, "cummax")
    assert dst.tolist() == [-np.inf, 2, 2]
    with pytest.raises(UnsupportedError):
        scan(dst, dst, "cumprod")


def test_reduce_many_adds_in_float32():
    bf16 = dtypes.numpy_dtype("bfloat16")
    parts = [dtypes.convert(np.full(4, x, np.float32), bf16) for x in (256.0, 1.0, 1.0)]
    assert reduce_many(parts, "sum", bf16).astype(float).tolist() == [258.0] * 4
    assert parts[0].astype(float).tolist() == [256.0] * 4
    single = [np.arange(3, dtype=np.float32)]
    assert reduce_many(single, "max", single[0].dtype) is not single[0]
    assert reduce_many([np.int8([100]), np.int8([100])], "sum", np.dtype(np.int8)).tolist() == [-56]
    assert reduce_many([np.float32([2]), np.float32([4])], "prod", np.dtype(np.float32)).tolist() == [8]


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "bitand", "bitor", "bitxor"])
@pytest.mark.parametrize("name", ["int8", "uint16", "int32"])
def test_identity_is_neutral(op: str, name: str):
    dtype = dtypes.numpy_dtype(name)
    values = dtypes.convert(RNG.integers(-(2**31), 2**31, 100), dtype)
    np.testing.assert_array_equal(combine_ufunc(op)(values, identity(op, dtype)), values)
