# SPDX-License-Identifier: MIT
"""GEMMs of every operand type against float64 and integer references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from tilescale.backends.emulator.numerics import decompress_2to4, dtypes, gemm, gemm_blockscaled, gemm_sparse
from tilescale.errors import ShapeError, UnsupportedError

RNG = np.random.default_rng(7)


def random(shape: tuple[int, ...], name: str) -> np.ndarray:
    dtype = dtypes.numpy_dtype(name)
    if dtypes.is_float(dtype):
        return dtypes.convert(RNG.standard_normal(shape).astype(np.float32), dtype)
    limit = 8 if name.endswith("int4") else 128
    return dtypes.convert(RNG.integers(0 if name[0] == "u" else -limit, limit, shape), dtype)


def exact(x: np.ndarray) -> np.ndarray:
    return dtypes.as_compute(x).astype(np.float64)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize(
    ("operand", "accumulator", "tolerance"),
    [
        ("float16", "float32", 1e-5),
        ("bfloat16", "float32", 1e-5),
        ("float8_e4m3", "float32", 1e-5),
        ("float8_e5m2", "float16", 1e-2),
        ("float16", "float16", 1e-2),
        ("float16", "bfloat16", 5e-2),
        ("float4_e2m1fn", "float32", 1e-5),
        ("float64", "float64", 1e-12),
        ("int8", "int32", 0),
        ("uint8", "int32", 0),
        ("int4", "int32", 0),
        ("int16", "int32", 0),
    ],
)
def test_gemm(operand: str, accumulator: str, tolerance: float, transpose_a: bool, transpose_b: bool, clear: bool):
    m, n, k = 32, 48, 80
    a = random((k, m) if transpose_a else (m, k), operand)
    b = random((n, k) if transpose_b else (k, n), operand)
    c = random((m, n), accumulator)
    expected = (exact(a).T if transpose_a else exact(a)) @ (exact(b).T if transpose_b else exact(b))
    expected += 0 if clear else exact(c)
    gemm(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, clear=clear)
    np.testing.assert_allclose(exact(c), expected, rtol=tolerance, atol=tolerance * np.sqrt(k))


def test_gemm_on_strided_views_changes_only_them():
    a = random((64, 64), "bfloat16")[::2, 8:40]
    b = random((64, 64), "bfloat16")[1::2, ::-1][:, :16]
    whole = np.zeros((40, 40), np.float32)
    c = whole[4:36, 2:34:2]
    gemm(a, b, c)
    np.testing.assert_allclose(c, exact(a) @ exact(b), rtol=1e-5, atol=1e-5)
    assert np.count_nonzero(whole) == np.count_nonzero(c)
    gemm(a, b, c[::-1], clear=True)
    np.testing.assert_allclose(c[::-1], exact(a) @ exact(b), rtol=1e-5, atol=1e-5)


def test_clear_discards_nan():
    c = np.full((16, 16), np.nan, np.float32)
    gemm(np.ones((16, 16), np.float16), np.ones((16, 16), np.float16), c, clear=True)
    assert (c == 16).all()


def test_read_only_operands():
    a = np.ones((16, 16), np.float32)
    a.flags.writeable = False
    c = np.zeros((16, 16), np.float32)
    gemm(a, a, c, tf32=False)
    assert (c == 16).all()


def test_tf32_truncates_operands():
    a = np.full((16, 16), 1 + 2.0**-11, np.float32)
    c = np.zeros((16, 16), np.float32)
    gemm(a, np.eye(16, dtype=np.float32), c)
    assert (c == 1).all()
    gemm(a, np.eye(16, dtype=np.float32), c, clear=True, tf32=False)
    assert (c == np.float32(1 + 2.0**-11)).all()


def test_int8_is_exact_beyond_the_float32_mantissa_and_wraps():
    a = np.full((16, 4096), -128, np.int8)
    c = np.full((16, 16), 2**31 - 1, np.int32)
    gemm(a, a, c, transpose_b=True)
    assert (c == (2**31 - 1 + 4096 * 128 * 128 + 2**31) % 2**32 - 2**31).all()
    odd = RNG.integers(-128, 128, (16, 4097)).astype(np.int8)
    gemm(odd, odd, c, transpose_b=True, clear=True)
    np.testing.assert_array_equal(c, odd.astype(np.int64) @ odd.T.astype(np.int64))


def test_int32_operands_wrap():
    a = RNG.integers(-(2**31), 2**31, (8, 8)).astype(np.int32)
    c = np.zeros((8, 8), np.int32)
    gemm(a, a, c)
    product = a.astype(object) @ a.astype(object) & 0xFFFFFFFF
    np.testing.assert_array_equal(c, product.astype(np.uint32).view(np.int32))


def test_bad_operands():
    with pytest.raises(ShapeError, match="32, 16"):
        gemm(np.zeros((16, 16)), np.zeros((32, 16)), np.zeros((16, 16)))
    with pytest.raises(UnsupportedError):
        gemm(np.zeros((16, 16)), np.zeros((16, 16)), np.zeros((16, 16), np.int32))


def sparse_matrix(rows: int, columns: int, name: str) -> np.ndarray:
    dense = random((rows, columns), name)
    group = 2 if dense.dtype.itemsize == 4 else 4
    order = RNG.random((rows, columns // group, group)).argsort(axis=-1)
    keep = (order < group // 2).reshape(rows, columns)
    return np.where(keep & (exact(dense) != 0), dense, dense.dtype.type(0))


def compress(dense: np.ndarray, meta_dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """The first positions that hold non-zeros, filled up from the end: any legal encoding will do."""
    one_of_two = dense.dtype.itemsize == 4
    kept, group = (1, 2) if one_of_two else (2, 4)
    blocks = dense.reshape(dense.shape[0], -1, group)
    nonzero = exact(blocks) != 0
    places = np.sort(np.argsort(~nonzero, axis=-1, kind="stable")[..., :kept], axis=-1)
    values = np.take_along_axis(blocks, places, axis=-1).reshape(dense.shape[0], -1)
    codes = np.where(places[..., 0] == 0, 0b0100, 0b1110) if one_of_two else places[..., 0] | places[..., 1] << 2
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return values, np.ascontiguousarray(pairs).view(meta_dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int8", "float8_e4m3"])
@pytest.mark.parametrize("meta_dtype", [np.uint8, np.int16, np.int32])
def test_decompress_inverts_compress(name: str, meta_dtype: type):
    dense = sparse_matrix(32, 128, name)
    values, metadata = compress(dense, meta_dtype)
    np.testing.assert_array_equal(exact(decompress_2to4(values, metadata)), exact(dense))


def test_decompress_of_a_repeated_position_keeps_the_first():
    values = np.array([[5, 0, 7, 9, 0, 0, 0, 0]], np.float16)
    dense = decompress_2to4(values, np.array([[0b1000_0000, 0]], np.uint8))
    assert dense.tolist() == [[5, 0, 0, 0, 7, 0, 9, 0] + [0] * 8]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
def test_decompress_of_cutlass_metadata_for_sm80(name: str):
    """torch compresses in CUTLASS's physical order, which TileLang names with a layout on the metadata buffer."""
    tilelang = pytest.importorskip("tilelang")
    from tilelang.layout.gemm_sp import make_cutlass_metadata_layout_sm8x

    dense = sparse_matrix(64, 128, name)
    values, metadata = sparse_semi_structured_from_dense_cutlass(dtypes.from_numpy(dense))
    physical = metadata.numpy()
    rows, columns = 64, physical.size // 64
    buffer = tilelang.tvm.tirx.decl_buffer((rows, columns), str(physical.dtype))
    layout = make_cutlass_metadata_layout_sm8x(buffer, name)
    places = np.array(
        [[[int(x) for x in layout.map_forward_index([i, j])] for j in range(columns)] for i in range(rows)]
    )
    logical = physical.reshape(rows, columns)[places[..., 0], places[..., 1]]
    got = decompress_2to4(dtypes.to_numpy(values), logical)
    np.testing.assert_array_equal(exact(got), exact(dense))


def test_gemm_sparse():
    dense, b = sparse_matrix(32, 64, "float16"), random((48, 64), "float16")
    values, metadata = compress(dense, np.int16)
    c = np.ones((32, 48), np.float32)
    gemm_sparse(values.T, metadata.T, b, c, transpose_a=True, transpose_metadata=True, transpose_b=True)
    np.testing.assert_allclose(c, exact(dense) @ exact(b).T + 1, rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="metadata"):
        gemm_sparse(values, metadata[:, 1:], b, c, transpose_b=True)


def test_gemm_blockscaled():
    a, b = random((32, 64), "float8_e4m3"), random((48, 64), "float8_e5m2")
    e8m0 = dtypes.numpy_dtype("float8_e8m0fnu")
    scale_a, scale_b = (RNG.integers(120, 132, (rows, 4)).astype(np.uint8).view(e8m0) for rows in (32, 48))
    c = np.zeros((32, 48), np.float32)
    gemm_blockscaled(
        a, b, c, scale_a, scale_b, k_start=64, granularity_a=32, granularity_b=32, transpose_b=True, clear=True
    )
    wide_a = exact(a) * exact(scale_a)[:, 2:].repeat(32, axis=1)
    wide_b = exact(b) * exact(scale_b)[:, 2:].repeat(32, axis=1)
    np.testing.assert_allclose(c, wide_a @ wide_b.T, rtol=1e-5, atol=1e-3)
    with pytest.raises(ShapeError, match="scales"):
        gemm_blockscaled(a, b, c, scale_a, scale_b, k_start=96, granularity_a=32, granularity_b=32, transpose_b=True)


def test_torch_reference_for_bfloat16():
    a, b = random((128, 64), "bfloat16"), random((64, 128), "bfloat16")
    c = np.zeros((128, 128), np.float32)
    gemm(a, b, c)
    rounded = dtypes.from_numpy(a) @ dtypes.from_numpy(b)
    torch.testing.assert_close(torch.from_numpy(c).bfloat16(), rounded, rtol=1.6e-2, atol=1e-5)
