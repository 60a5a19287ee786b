# SPDX-License-Identifier: MIT
"""Matrices rounded to float8: bit for bit what PyTorch's operations make of them."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from tests.cuda.support import source
from tests.halves import half_at_night
from tests.ops.roundings import as_it_lies, by_pytorch, of_many_magnitudes, same
from tilescale.errors import ArgumentError
from tilescale.ops.rounding import (
    MOST_THREADS,
    ROW_HELD,
    TALL,
    TILE,
    largest,
    rounded_rows,
    rows_program,
    tile_of,
    tiles_program,
)

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)

SHAPES = ((1, 16), (70, 48), (TILE[1] + 16, 9 * TILE[0] + 16), (3, 4112))

SCALINGS = ("rowwise", "tensorwise")

LAYOUTS = ("contiguous", "across", "strided")


def meets_all(shape: int, scaling: int, how: int, kind: int) -> bool:
    """Whether positions are among those in which each two values of different axes meet."""
    return (scaling, kind) == ((shape + how) % 2, (shape // 2 + how) % 2)


@pytest.mark.parametrize(
    ("shape", "scaling", "how", "kind"),
    [
        pytest.param(*values, marks=[] if meets_all(*at) else pytest.mark.nightly)
        for at, values in zip(
            product(*map(range, map(len, (SHAPES, SCALINGS, LAYOUTS, KINDS)))),
            product(SHAPES, SCALINGS, LAYOUTS, KINDS),
            strict=True,
        )
    ],
)
def test_bits_are_those_of_pytorch(shape: tuple[int, int], scaling: str, how: str, kind: torch.dtype):
    torch.manual_seed(sum(shape))
    x = of_many_magnitudes(*shape)
    assert same(rounded_rows(as_it_lies(x, how), kind, scaling), by_pytorch(x, kind, scaling))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_stay_what_they_are(kind: torch.dtype):
    """One below the largest number of the type, that, and one above it, of which each becomes at most the largest."""
    most = torch.finfo(kind).max
    x = torch.tensor([[most * (1 - 2**-8)] * 16, [most] * 16, [most * (1 + 2**-7)] * 16, [-most] * 16]).bfloat16()
    made, scales = rounded_rows(x, kind, "rowwise")
    assert scales.tolist() == [1, 2, 2, 2]
    assert torch.equal(made[1].float() * 2, x[1].float()) and float(made.float().abs().max()) <= most
    assert same((made, scales), by_pytorch(x, kind, "rowwise"))


@pytest.mark.parametrize(("how", "kind"), half_at_night(LAYOUTS[:2], KINDS))
@pytest.mark.parametrize("found", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_is_seen_in_all_that_shares_its_scale(found: float, how: str, kind: torch.dtype):
    x = torch.ones(80, 160).bfloat16()
    x[70, 150] = found
    made, scales = rounded_rows(as_it_lies(x, how), kind, "rowwise")
    assert scales.isnan().nonzero().tolist() == [[70]]
    assert made.float().isnan().all(1).nonzero().tolist() == [[70]] and int(made.float().isnan().sum()) == 160
    made, scales = rounded_rows(as_it_lies(x, how), kind, "tensorwise")
    assert bool(scales.isnan().all()) and bool(made.float().isnan().all())


def test_the_largest_number_is_known_whatever_type_new_tensors_have():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert largest("float8_e4m3fn") == torch.tensor(448, dtype=torch.float32).view(torch.int32)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_rows_and_rows_too_wide():
    made, scales = rounded_rows(torch.empty(0, 16).bfloat16(), KINDS[0], "rowwise")
    assert made.shape == (0, 16) and scales.shape == (0,)
    wide = torch.empty(1, ROW_HELD * MOST_THREADS + 16, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"a row has 131088 numbers"):
        rounded_rows(wide, KINDS[0], "rowwise")


@pytest.mark.parametrize("columns", [16, 48, 1024, 1040, 4096, 7168, 14336, 28672, ROW_HELD * MOST_THREADS])
def test_threads_share_rows_evenly(columns: int):
    high, wide, threads = tile_of(columns)
    assert wide >= columns and high * wide % (8 * threads) == 0 and high <= TALL
    assert high * wide // threads <= ROW_HELD and threads <= MOST_THREADS


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("columns", [3072, 7168])
def test_rows_are_read_once_and_16_bytes_at_a_time(columns: int, kind: str):
    text = source(rows_program(columns, kind))
    kernel = text[text.rindex('extern "C"') :]
    assert re.findall(r"= \*\((\w+)\*\)\(X", kernel) == ["int4"] and kernel.count("(X ") == 1
    assert re.findall(r"\*\((fp8_\w+?_8_t)\*\)\(Q", kernel)


def test_a_transposed_line_is_stored_16_bytes_at_a_time():
    """And the tile in shared memory is read from banks that differ: rows that threads read at once are 16 apart."""
    text = source(tiles_program(512, 256, "float8_e4m3fn", True, True))
    kernel = text[text.rindex('extern "C"') :]
    assert "*(fp8_e4_16_t*)(Q" in kernel and "*(int4*)(X" in kernel
    assert re.search(r"\^ \(\(\(int\)threadIdx\.x\) & 7\)\) \* 8", kernel), "columns of a row depend on the row / 16"
