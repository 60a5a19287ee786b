# SPDX-License-Identifier: MIT
"""Warp operations against a lane-by-lane reading of the PTX manual."""

from __future__ import annotations

import numpy as np
import pytest

from tilescale.backends.emulator.numerics import convert, match_all, match_any, numpy_dtype, shfl, vote, warp_reduce
from tilescale.errors import UnsupportedError


def ptx_shuffle(thread: int, lane: int, width: int, kind: str, threads: int) -> int:
    here = thread % 32
    base = here // width * width
    if kind == "idx":
        target, valid = base + lane % width, True
    elif kind == "up":
        target, valid = here - lane, here - lane >= base
    else:
        target = here + lane if kind == "down" else here ^ lane
        valid = target <= base + width - 1
    source = thread - here + target
    return source if valid and source < threads else thread


@pytest.mark.parametrize("kind", ["idx", "up", "down", "xor"])
@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("threads", [32, 96, 80])
def test_shuffle(kind: str, width: int, threads: int):
    values = np.arange(threads, dtype=np.float16)
    for lane in (0, 1, 3, 8, 31):
        expected = [ptx_shuffle(t, lane, width, kind, threads) for t in range(threads)]
        assert shfl(values, lane, width, kind).tolist() == expected
    lanes = np.arange(threads) * 7 % 32
    expected = [ptx_shuffle(t, int(lanes[t]), width, kind, threads) for t in range(threads)]
    assert shfl(values, lanes, width, kind).tolist() == expected


def test_shuffle_of_rows_and_errors():
    rows = np.arange(64).reshape(32, 2)
    np.testing.assert_array_equal(shfl(rows, 1, kind="xor")[0], rows[1])
    with pytest.raises(UnsupportedError, match="left"):
        shfl(rows, 1, kind="left")


def test_votes():
    predicate = np.zeros(70, np.int32)
    predicate[[3, 40, 41, 64, 65, 66, 67, 68, 69]] = 5
    assert vote(predicate, kind="any").tolist() == [1] * 70
    assert vote(predicate, mask=0b111, kind="any").tolist() == [0] * 64 + [1] * 6
    assert vote(predicate, kind="all").tolist() == [0] * 64 + [1] * 6
    assert vote(predicate, mask=1 << 3, kind="all")[0] == 1
    ballot = vote(predicate, kind="ballot")
    assert ballot.dtype == np.uint64 and ballot[[0, 32, 69]].tolist() == [8, 0b1100000000, 0b111111]
    with pytest.raises(UnsupportedError, match="most"):
        vote(predicate, kind="most")


def test_match():
    values = np.arange(40) % 4
    sets = match_any(values)
    assert sets.dtype == np.uint32 and sets[1] == 0x22222222 and sets[33] == 0b00100010
    assert match_all(values).tolist() == [0] * 40
    assert match_all(values, mask=0x11111111)[0] == 0x11111111
    assert match_all(np.ones(40, np.float32)).tolist() == [0xFFFFFFFF] * 32 + [0xFF] * 8


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "uint8"])
def test_reductions(name: str):
    dtype = numpy_dtype(name)
    values = convert(np.arange(64) % 7, dtype)
    warps = values.astype(np.float64).reshape(2, 32)
    for kind, reference in (("sum", warps.sum(1)), ("max", warps.max(1)), ("min", warps.min(1))):
        got = warp_reduce(values, kind)
        assert got.dtype == dtype and got.astype(float).tolist() == np.repeat(reference, 32).tolist()
    if dtype.kind in "iu":
        assert warp_reduce(values, "bitor").tolist() == [7] * 64 and not warp_reduce(values, "bitand").any()
