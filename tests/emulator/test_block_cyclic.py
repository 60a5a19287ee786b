# SPDX-License-Identifier: MIT
"""Views of tiles on chip in blocks that are dealt out in turn: unit r has rows r*b, ..., r*b+b-1, and so on."""

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of, race
from tests.emulator.support import blank, values
from tilescale.backends.emulator.interpret.selections import Selection, located
from tilescale.errors import UninitializedReadError, UnsupportedError

ROWS, COLUMNS, GROUPS, BLOCK = 16, 8, 2, 2


def mine(rank, rows=ROWS, groups=GROUPS, block=BLOCK):
    """The rows of a unit, one after the other."""
    return [row for row in range(rows) if row // block % groups == rank]


def test_a_selection_is_indexed_as_an_array():
    array, rows = np.arange(16 * 3).reshape(16, 3), mine(1)
    seen, same = Selection(array, 0, np.array(rows)), array[rows]
    assert (seen.shape, seen.ndim, seen.size) == (same.shape, same.ndim, same.size)
    places = np.array([0, 5, 7]), np.array([2, 0, 1])
    for index in ((3, 1), places, (places[0], 2)):
        assert np.array_equal(seen[index], same[index])
    for slices in ((), (slice(2, 5),), (slice(None), slice(1, 3)), (slice(1, 6, 2), slice(0, 1))):
        assert np.array_equal(seen[slices], same[slices]) and seen[slices].shape == same[slices].shape
    behind, index = located(seen[slice(2, 5), slice(1, 3)])
    assert behind.base is array.base and np.array_equal(behind[index], same[2:5, 1:3])
    seen[slice(2, 4), slice(0, 2)] = -1
    seen[(7, 2)] = -2
    assert (array[rows[2:4], :2] == -1).all() and array[rows[7], 2] == -2 and (array < 0).sum() == 5


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("groups", "block"), [(2, 2), (2, 4), (4, 2)])
def test_units_write_their_rows(dim, groups, block):
    """Whole, by parts, by elements, by atomics on elements and tiles."""
    shape = (16, 4) if dim == 0 else (4, 16)

    @T.prim_func
    def program(X: T.Tensor(shape, "int32"), Y: T.Tensor(shape, "int32")):
        with T.Kernel(1, threads=128 * groups):
            tile, copied = T.alloc_shared(shape, "int32"), T.alloc_shared(shape, "int32")
            T.copy(X, copied)
            with T.Scale("warpgroup") as (wg, _):
                view = T.view(tile, layout=T.Shard(dim, block=block))
                T.fill(view, wg * 100)
                for i, j in T.Parallel(*view.shape):
                    view[i, j] += i * 4 + j
                source = T.view(copied, layout=T.Shard(dim, block=block))
                T.atomic_add(view[0, 0], source[0, 0])
                T.copy(view[0:2, 0:2], source[0:2, 0:2])
                T.copy(source, view)
            T.copy(tile, Y)

    x, y = values(3, *shape, dtype="int32"), blank(*shape, dtype="int32")
    tilescale.emulate(program, [x, y])
    expected = x.clone()
    for rank in range(groups):
        held = x.index_select(dim, torch.tensor(mine(rank, 16, groups, block)))
        steps = sum(n * torch.arange(size).reshape([-1, 1][:: 1 - 2 * axis]) for axis, (n, size) in
                    enumerate(zip((4, 1), held.shape, strict=True)))  # fmt: skip
        new = held.clone()
        new[:2, :2] = (100 * rank + steps)[:2, :2].to(torch.int32)
        new[0, 0] += 128 * held[0, 0]  # by each thread
        expected.index_copy_(dim, torch.tensor(mine(rank, 16, groups, block)), new)
    assert torch.equal(y, expected)


def test_products_and_exchanges_of_rows_in_turn():
    """Each warpgroup computes its rows of a GEMM and sends them to the other one."""

    @T.prim_func
    def program(
        A: T.Tensor((ROWS, 16), "float16"),
        B: T.Tensor((16, COLUMNS), "float16"),
        C: T.Tensor((ROWS, COLUMNS), "float32"),
        D: T.Tensor((ROWS, COLUMNS), "float32"),
    ):
        with T.Kernel(1, threads=128 * GROUPS):
            a, b = T.alloc_shared((ROWS, 16), "float16"), T.alloc_shared((16, COLUMNS), "float16")
            c, other = (T.alloc_shared((ROWS, COLUMNS), "float32") for _ in range(2))
            T.copy(A, a)
            T.copy(B, b)
            with T.Scale("warpgroup") as (wg, size):
                own = T.view(c, layout=T.Shard(0, block=BLOCK))
                T.gemm(T.view(a, layout=T.Shard(0, block=BLOCK)), b, own, clear_accum=True)
                T.copy(own, T.view(other, layout=T.Shard(0, block=BLOCK)), dst=(wg + 1) % size)
                T.barrier()
            T.copy(c, C)
            T.copy(other, D)

    a, b = values(0, ROWS, 16, dtype="float16"), values(1, 16, COLUMNS, dtype="float16")
    c, d = blank(ROWS, COLUMNS), blank(ROWS, COLUMNS)
    tilescale.emulate(program, [a, b, c, d])
    torch.testing.assert_close(c, a.float() @ b.float())
    assert torch.equal(d[mine(0)], c[mine(1)]) and torch.equal(d[mine(1)], c[mine(0)])


def views(fault):
    @T.prim_func
    def program(X: T.Tensor((ROWS,), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((ROWS,), "float32")
            with T.Scale("warpgroup") as (wg, _):
                T.fill(T.view(tile, layout=T.Shard(0, block=BLOCK)), 1.0)  # in turn
                if fault == "overlap":
                    T.fill(T.view(tile, layout=T.Shard(0)), 2.0)  # at once
            if fault == "again":
                T.fill(tile, 2.0)
            T.copy(tile, X)

    return program


def test_races_between_rows_in_turn_and_at_once():
    race(views("overlap"), [blank(ROWS)], "in turn", "at once", check="all")
    for fault in ("again", None):
        x = blank(ROWS)
        tilescale.emulate(views(fault), [x])
        assert (x == (2 if fault else 1)).all()


def test_rows_that_nobody_wrote():
    @T.prim_func
    def program(X: T.Tensor((ROWS,), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((ROWS,), "float32")
            with T.Scale("warpgroup") as (wg, _):
                if wg == 0:
                    T.fill(T.view(tile, layout=T.Shard(0, block=BLOCK)), 1.0)
            T.copy(tile, X)  # all of them

    with pytest.raises(UninitializedReadError) as caught:
        tilescale.emulate(program, [blank(ROWS)])
    assert caught.value.where[0].line == line_of("all of them") and "tile[2:16]" in caught.value.message


def test_a_run_without_data_and_a_second_dimension():
    assert tilescale.emulate(views(None), data=False).time_us > 0

    @T.prim_func
    def program(X: T.Tensor((ROWS, ROWS), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((ROWS, ROWS), "float32")
            T.clear(tile)
            with T.Scale("warpgroup"):
                rows = T.view(tile, layout=T.Shard(0, block=BLOCK))
                with T.Scale("warp"):
                    T.fill(T.view(rows, layout=T.Shard(1, block=BLOCK)), 1.0)
            T.copy(tile, X)

    with pytest.raises(UnsupportedError, match="along dimension 0 and along dimension 1"):
        tilescale.emulate(program, [blank(ROWS, ROWS)])
