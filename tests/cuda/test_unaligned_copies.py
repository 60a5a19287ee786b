# SPDX-License-Identifier: MIT
"""Stores that bulk instructions cannot make are made by threads: addresses, sizes, parts of tiles."""

import re
from typing import Any

import pytest
import tilelang
import torch
from tilelang.backend.target import determine_target

import tilescale
import tilescale.language as T
from tests.cuda.support import source

TARGET = determine_target({"kind": "cuda", "arch": "sm_90a"}, return_object=True)


def stored(row: int, begin: int, at: Any, size: Any, wide: int = 64):
    """A store of `size` elements of a row of a tile to a row of Y; `at` and `size` by the block and an argument."""

    @T.prim_func
    def program(X: T.Tensor((4, wide), "float32"), Y: T.Tensor((4, 64), "float32"), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_shared((4, wide), "float32")
            T.copy(X, tile)
            to, count = at(bx), size(n)
            T.copy(tile[row, begin : begin + count], Y[bx, to : to + count])

    return program


def is_bulk(func: Any) -> bool:
    return "tma_store(" in source(func).split('extern "C"')[-1]


FOUR = lambda n: 4  # noqa: E731
FIRST = lambda bx: 0  # noqa: E731

STORES = {
    "aligned": ((0, 0, FIRST, FOUR), True),
    "aligned blocks": ((0, 0, lambda bx: bx * 4, FOUR), True),
    "aligned size": ((0, 0, FIRST, lambda n: (n & 15) * 4), True),
    "target": ((0, 0, lambda bx: 1, FOUR), False),
    "source": ((0, 1, FIRST, FOUR), False),
    "blocks": ((0, 0, lambda bx: bx * 5, FOUR), False),
    "rows of 20 bytes": ((1, 0, FIRST, FOUR, 5), False),
    "size": ((0, 0, FIRST, lambda n: n & 31), False),
    "unbounded size": ((0, 0, FIRST, lambda n: 8 - n), False),
}


@pytest.mark.parametrize(("given", "bulk"), STORES.values(), ids=STORES)
def test_addresses_and_sizes_of_bulk_stores_are_multiples_of_16_bytes(given: tuple[Any, ...], bulk: bool):
    assert is_bulk(stored(*given)) == bulk
    row, begin, at, size, wide = (*given, 64)[:5]
    x, y, n = torch.rand(4, wide), torch.zeros(4, 64), 3
    tilescale.emulate(stored(*given), [x, y, n])
    want = torch.zeros(4, 64)
    for bx in range(4):
        want[bx, at(bx) : at(bx) + size(n)] = x[row, begin : begin + size(n)]
    assert torch.equal(y, want)


def test_a_descriptor_takes_any_place_of_device_memory():
    """It is used where a copy may end beyond its tensor, as loads of factors of any number of rows."""
    wide = T.dynamic("wide")

    @T.prim_func
    def program(X: T.Tensor((4, 64), "float32"), Y: T.Tensor((4, wide), "float32")):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_shared((4, 64), "float32")
            T.copy(X, tile)
            T.copy(tile[0, 0:4], Y[bx, bx : bx + 4])

    assert is_bulk(program)
    x, y = torch.rand(4, 64), torch.zeros(4, 6)
    tilescale.emulate(program, [x, y])
    want = torch.zeros(4, 6)
    for bx in range(4):
        want[bx, bx : bx + 4] = x[0, : min(4, 6 - bx)]
    assert torch.equal(y, want)


def part(rows: slice, columns: slice, dtype: str):
    """A store of a part of a tile of 64 x 64."""

    @T.prim_func
    def program(X: T.Tensor((64, 64), dtype), Y: T.Tensor((64, 128), dtype)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), dtype)
            T.copy(X, tile)
            T.copy(tile[rows, columns], Y[rows, columns])

    return program


ALL, HIGH, LOW, MIDDLE = slice(0, 64), slice(0, 32), slice(32, 64), slice(8, 40)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "bulk"),
    [
        (ALL, ALL, "float32", True),
        (LOW, ALL, "bfloat16", True),
        (HIGH, ALL, "float32", False),
        (LOW, ALL, "float32", False),
        (ALL, HIGH, "bfloat16", False),
        (MIDDLE, MIDDLE, "float32", False),
    ],
)
def test_parts_of_tiles_in_several_pieces_are_stored_by_threads(rows: slice, columns: slice, dtype: str, bulk: bool):
    func = part(rows, columns, dtype)
    assert is_bulk(func) == bulk
    x, y = torch.rand(64, 64).to(getattr(torch, dtype)), torch.zeros(64, 128).to(getattr(torch, dtype))
    tilescale.emulate(func, [x, y])
    want = torch.zeros_like(y)
    want[rows, columns] = x[rows, columns]
    assert torch.equal(y, want)


def test_upstream_has_no_text_for_such_a_part():
    with TARGET, pytest.raises(Exception, match="plain SMEM layout is not a bijection"):
        tilelang.lower(part(HIGH, ALL, "float32"), target=TARGET)


def test_upstream_stores_unaligned_addresses_in_bulk():
    with TARGET:
        text = tilelang.lower(stored(0, 0, lambda bx: 1, FOUR), target=TARGET).kernel_source
    assert re.search(r"tma_store\(\(&\(Y\[\(.*\+ 1\)\]\)\), ", text), "mended upstream"
