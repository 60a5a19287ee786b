# SPDX-License-Identifier: MIT
"""Gathers of rows that a grid makes: each chunk leaves when its tiles are done."""

import re
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.overlap.support import H200, check_same, overlapped
from tests.overlap.test_gather import is_wait
from tests.overlap.test_symbolic import DEVICES, TILE, WIDE, arguments
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError, UninitializedReadError


def sum_of_made_parts(devices: int, *, first: int = 0, rows: Any = None) -> Any:
    """Each block doubles a tile of rows, which are gathered; then it adds up this tile of the parts of the ranks
    before, from the `first` one before on: 0 is its own rank."""
    rows = T.dynamic("rows") if rows is None else rows

    @T.prim_func
    def f(X: T.Tensor((1, rows, 2 * WIDE), "float32"), Y: T.Tensor((rows, 2 * WIDE), "float32")):
        with T.Kernel(device=devices, block=(2, T.ceildiv(rows, TILE)), threads=32) as (column, tile):
            local, gathered = (T.alloc((n, rows, 2 * WIDE), "float32", level="l2") for n in (1, devices))
            made, x, y = (T.alloc((TILE, WIDE), "float32", level="l1") for _ in range(3))
            with T.Scale("device"), T.Scale("block"):
                T.copy(X[0, tile * TILE, column * WIDE], made)
                for i, j in T.Parallel(TILE, WIDE):
                    made[i, j] = made[i, j] + made[i, j]
                T.copy(made, local[0, tile * TILE, column * WIDE])
            with T.Scale("device"):
                T.all_gather(local, gathered, dim=0)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                T.clear(y)
                for step in T.serial(first, devices):
                    T.copy(gathered[(rank + devices - step) % devices, tile * TILE, column * WIDE], x)
                    for i, j in T.Parallel(TILE, WIDE):
                        y[i, j] = y[i, j] + x[i, j]
                T.copy(y, Y[tile * TILE, column * WIDE])

    return f


@pytest.mark.parametrize("rows", [None, 10])
@pytest.mark.parametrize(("first", "group"), [(0, None), (1, None), (1, 2)])
def test_chunks_leave_when_their_tiles_are_done(rows: int | None, first: int, group: int | None):
    func = sum_of_made_parts(DEVICES, first=first, rows=rows)
    changed, schedule = overlapped(func, chunk=8, local="source", group=group)
    assert "a chunk is sent when its tiles are counted" in str(schedule)
    assert ("local rows are copied" in str(schedule)) == (first == 0), "else no tile reads them"
    text = changed.script()
    assert len(re.findall(r"T\.tilescale\.signal\(T\.region\(local_done", text)) == 1
    assert ("T.copy(T.region(local" in text) == (first == 0)
    for count in (1, 10, 23) if rows is None else (rows,):
        check_same(func, changed, arguments(func, count), seeds=(None, 1))


def test_a_wait_that_is_left_out_would_race():
    changed, _ = overlapped(sum_of_made_parts(DEVICES), chunk=TILE)
    without = changed.with_body(tir.rewrite(changed.body, leave=lambda n: tir.sequence([]) if is_wait(n) else None))
    with pytest.raises((RaceError, UninitializedReadError)):
        tilescale.emulate(without, arguments(changed, 10), machine=H200, time=False)


def test_one_unit_sends_nothing():
    assert "counted" not in str(overlapped(sum_of_made_parts(1), chunk=TILE, local="source")[1])
