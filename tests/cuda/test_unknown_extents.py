# SPDX-License-Identifier: MIT
"""Copies between devices of which bulk copies cannot carry some, or all at some arguments: threads put these."""

import re
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import notes, source
from tilescale.errors import ShapeError, UnsupportedError


def exchanged(rows: Any, blocks: int = 132):
    """A put of some rows of a tile of 128 KiB by each block."""

    @T.prim_func
    def program(
        X: T.Tensor((64, 512), "float32"), Y: T.Tensor((blocks, 64, 512), "float32"), N: T.Tensor((1,), "int32"),
        n: T.int32,
    ):  # fmt: skip
        with T.Kernel(device=2, block=blocks, threads=128) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((64, 512), "float32")
                T.copy(X, tile)
                count = rows(N, n)
                T.copy(tile[0:count, :], Y[bx, 0:count, :], dst=1 - rank)

    return program


ROWS = {
    "loaded": (lambda N, n: N[0], 7),
    "argument": (lambda N, n: n, 3),
    "product": (lambda N, n: n * n, 9),
    "shift": (lambda N, n: 64 >> n, 8),
    "remainder": (lambda N, n: n & 63, 3),
    "choice": (lambda N, n: T.if_then_else(n > 1, 5, n), 5),
}


@pytest.mark.parametrize(("rows", "count"), ROWS.values(), ids=ROWS)
def test_unknown_numbers_of_rows_are_put_by_threads(rows: Any, count: int):
    func = exchanged(rows)
    assert "tma_store(" not in source(func).split('extern "C"')[-1]
    assert re.search(r"\): lsu \(.*tma: moves boxes of constant extents, these are known at launch", notes(func)[0])
    args = [[torch.rand(64, 512), torch.zeros(1, 64, 512), torch.tensor([7]).int(), 3] for _ in "ab"]
    tilescale.emulate(exchanged(rows, blocks=1), args)
    for (x, *_), (_, y, *_) in zip(args, args[::-1], strict=True):
        assert torch.equal(y[0, :count], x[:count]) and not y[0, count:].any()


def put(at: Any, impl: str | None = None):
    """A put of a tile of 64 KiB by each block of a full device."""

    @T.prim_func
    def program(X: T.Tensor((1 << 14,), "float32"), Y: T.Tensor((1 << 22,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=132, threads=128) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((1 << 14,), "float32")
                T.copy(X, tile)
                begin = at(bx, n)
                T.copy(tile, Y[begin : begin + (1 << 14)], dst=1 - rank, impl=impl)

    return program


@pytest.mark.parametrize(
    ("at", "multiple"),
    [
        (lambda bx, n: bx * (1 << 14), 0),
        (lambda bx, n: bx * (1 << 14) + n * 4, 0),
        (lambda bx, n: 1, 4),
        (lambda bx, n: bx * ((1 << 14) + 2), 8),
        (lambda bx, n: n, 4),
    ],
)
def test_bulk_copies_between_devices_begin_at_multiples_of_16_bytes(at: Any, multiple: int):
    assert ("): lsu (" if multiple else "): tma (") in notes(put(at))[0]
    if multiple:
        with pytest.raises(UnsupportedError, match="begin at multiples of 16 bytes, these at") as info:
            source(put(at, "tma"))
        assert info.value.where[0].file == __file__


def emulated(func: Any) -> None:
    tilescale.emulate(func, [[torch.zeros(8, 8), torch.zeros(8), 3] for _ in "ab"])


@pytest.mark.parametrize("run", [source, emulated])
def test_other_numbers_of_extents_are_refused_alike(run: Any):
    @T.prim_func
    def program(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((8, 8), "float32")
                T.copy(X, tile)
                T.copy(tile[0:n, 0:4], Y[0:n], dst=1 - rank)

    with pytest.raises(ShapeError, match="between tiles of different extents: .* of 'tile' and .* of 'Y'") as info:
        run(program)
    assert info.value.where[0].file == __file__
