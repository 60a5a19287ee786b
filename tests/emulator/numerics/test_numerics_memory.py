# SPDX-License-Identifier: MIT
"""im2col against torch's unfold; atomics against one-at-a-time updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilescale.backends.emulator.numerics import atomic_update, convert, im2col, numpy_dtype
from tilescale.errors import ShapeError, UnsupportedError

RNG = np.random.default_rng(5)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "pad"), [(3, 1, 1, 1), (3, 2, 1, 0), (5, 1, 2, 3), (1, 1, 1, 0)]
)
@pytest.mark.parametrize("tile", [(16, 8), (13, 12)])
def test_im2col(kernel: int, stride: int, dilation: int, pad: int, tile: tuple[int, int]):
    image = RNG.standard_normal((2, 11, 9, 8)).astype(np.float32)
    unfolded = torch.nn.functional.unfold(
        torch.from_numpy(image).permute(0, 3, 1, 2), kernel, dilation=dilation, padding=pad, stride=stride
    ).numpy()
    pixels = unfolded.shape[2]
    expected = unfolded.reshape(2, 8, kernel * kernel, pixels).transpose(0, 3, 2, 1).reshape(2 * pixels, -1)
    for step in range(-(-expected.shape[0] // tile[0])):
        for c_step in range(expected.shape[1] // tile[1]):
            col = np.full(tile, np.nan, np.float32)
            im2col(image, col, step, c_step, kernel, stride, dilation, pad)
            want = expected[step * tile[0] :][: tile[0], c_step * tile[1] : (c_step + 1) * tile[1]]
            np.testing.assert_array_equal(col[: len(want)], want)
            assert not col[len(want) :].any()


def test_im2col_shapes():
    with pytest.raises(ShapeError, match="N, H, W, C"):
        im2col(np.zeros((4, 4, 4)), np.zeros((4, 4)), 0, 0, 3, 1, 1, 1)


def sequential(array: np.ndarray, places: list[int], values: list[float], op: str) -> list[float]:
    """One update at a time; returns what each saw."""
    seen = []
    for place, value in zip(places, values, strict=True):
        old = float(array[place])
        seen.append(old)
        new = {"add": old + value, "max": max(old, value), "min": min(old, value), "exch": value}.get(op)
        if new is None:
            new = {"or": int(old) | int(value), "and": int(old) & int(value), "xor": int(old) ^ int(value)}[op]
        array[place] = convert(np.array(new), array.dtype)
    return seen


@pytest.mark.parametrize("op", ["add", "max", "min", "exch", "or", "and", "xor"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int32", "uint8"])
def test_atomics_with_duplicates(op: str, name: str):
    dtype, rng = numpy_dtype(name), np.random.default_rng(5)
    if op in ("or", "and", "xor") and dtype.kind not in "iu":
        return
    start = convert(np.array([3, 0, 7, 1, 1, 8]), dtype)
    for count in (*range(1, 21), *range(1, 21)):
        places, values = rng.integers(0, 6, count), rng.integers(0, 10, count)
        expected, with_prev, without = start.copy(), start.copy(), start.copy()
        seen = sequential(expected, places.tolist(), values.tolist(), op)
        got = atomic_update(with_prev, (places,), values, op, return_prev=True)
        assert got.dtype == dtype and got.astype(float).tolist() == seen
        assert atomic_update(without, (places,), values, op) is None
        for result in (with_prev, without):
            np.testing.assert_array_equal(result.astype(float), expected.astype(float))


def test_half_rounds_every_step():
    array = np.array([2048], np.float16)
    atomic_update(array, (np.zeros(4, int),), np.ones(4), "add")
    assert array[0] == 2048


def test_masked_strided_two_dimensional():
    whole = np.zeros((8, 8), np.float32)
    view = whole[::2, 1::2]
    rows, columns = np.arange(4)[:, None], np.array([0, 1, 1])[None, :]
    mask = np.array([[True, True, False]])
    prev = atomic_update(view, (rows, columns), 2.0, "add", mask=mask, return_prev=True)
    assert prev.shape == (4, 3) and not prev.any()
    assert view.tolist() == [[2, 2, 0, 0]] * 4 and whole.sum() == 16
    atomic_update(view, (rows, columns), 1.0, "add")
    assert view.tolist() == [[3, 4, 0, 0]] * 4
    atomic_update(view, (), np.ones((4, 4)), "max")
    assert view.tolist() == [[3, 4, 1, 1]] * 4


def test_scalars_load_store_cas():
    array = np.array([5, 6], np.int32)
    assert atomic_update(array, (1,), 2, "add", return_prev=True) == 6 and array[1] == 8
    assert atomic_update(array, (0,), (4, 9), "cas", return_prev=True) == 5 and array[0] == 5
    assert atomic_update(array, (0,), (5, 9), "cas", return_prev=True) == 5 and array[0] == 9
    same = np.zeros(3, int)
    prev = atomic_update(array, (same,), (np.array([9, 9, 1]), np.array([1, 2, 3])), "cas", return_prev=True)
    assert prev.tolist() == [9, 1, 1]
    assert array[0] == 3
    assert atomic_update(array, (np.array([1, 0]),), None, "load").tolist() == [8, 3]
    atomic_update(array, (same,), np.array([1, 2, 4]), "store")
    assert array.tolist() == [4, 8]
    assert atomic_update(array, (same[:0],), np.array([]), "add", return_prev=True).shape == (0,)


def test_atomic_errors():
    with pytest.raises(UnsupportedError, match="nand"):
        atomic_update(np.zeros(2), (np.array([0, 1]),), 1, "nand")
    with pytest.raises(ShapeError, match="values"):
        atomic_update(np.zeros(2), (np.array([0, 1]),), np.zeros(3), "add")
    with pytest.raises(ShapeError, match="values"):
        atomic_update(np.zeros(2), (), np.zeros((3, 2)), "add")
    with pytest.raises(ShapeError, match="indices"):
        atomic_update(np.zeros((2, 2)), (np.array([0, 1]),), 1, "add")
