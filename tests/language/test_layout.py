# SPDX-License-Identifier: MIT
"""Layouts: shares of a shape, and which functions from indices to ranks are recognised."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilelang_core import ir
from tilescale.errors import LayoutError, ShapeError
from tilescale.program.layout import FullCol, FullRow, Layout, Replica, Shard, from_function

sizes = st.integers(1, 6)
blocks = st.integers(1, 4)
rounds = st.integers(1, 4)
others = st.lists(st.integers(1, 5), max_size=2)


@st.composite
def splits(draw) -> tuple[list[int], int, int, int]:
    """A shape, its split dimension, the block, and the number of units, such that shares are equal."""
    size, block = draw(sizes), draw(blocks)
    rest = draw(others)
    axis = draw(st.integers(0, len(rest)))
    return [*rest[:axis], size * block * draw(rounds), *rest[axis:]], axis, block, size


def indices(shape: list[int]):
    for linear in range(math.prod(shape)):
        index = []
        for extent in reversed(shape):
            linear, i = divmod(linear, extent)
            index.append(i)
        yield index[::-1]


def rank(layout: Layout, shape: list[int], size: int, index: list[int]) -> int:
    """The unit of an index, from the definition of a layout."""
    axis = layout.axis(len(shape))
    return index[axis] // (layout.block or shape[axis] // size) % size


@given(splits())
def test_functions_are_recognised(split):
    shape, axis, block, size = split
    layout = from_function(lambda *index: index[axis] // block % size, shape, size)
    assert all(rank(layout, shape, size, index) == index[axis] // block % size for index in indices(shape))
    wanted = [n // size if i == axis else n for i, n in enumerate(shape)]
    # With one unit every dimension is split in one share.
    assert layout.shard_shape(shape, size) == (wanted if size > 1 else shape)


@given(splits())
def test_shares_are_equal_and_cover_the_shape(split):
    shape, axis, block, size = split
    layout = Shard(axis, block=block)
    ranks = [rank(layout, shape, size, index) for index in indices(shape)]
    assert {ranks.count(r) for r in range(size)} == {math.prod(layout.shard_shape(shape, size))}


@given(splits(), st.data())
def test_a_function_that_differs_anywhere_is_refused(split, data):
    shape, axis, block, size = split
    if size == 1:
        return
    wrong = data.draw(st.tuples(*(st.integers(0, n - 1) for n in shape)))

    def function(*index: int) -> int:
        right = index[axis] // block % size
        return (right + 1) % size if index == wrong and math.prod(shape) > size else right

    if math.prod(shape) > size:
        with pytest.raises(LayoutError):
            from_function(function, shape, size)


@given(st.integers(1, 64), sizes, st.one_of(st.none(), blocks))
def test_extents_that_do_not_divide_are_refused(extent: int, size: int, block: int | None):
    layout = Shard(0, block=block)
    if extent % (size * (block or 1)):
        with pytest.raises(ShapeError, match=f"{extent} elements.*{size} units"):
            layout.shard_shape([extent, 3], size)
    else:
        assert layout.shard_shape([extent, 3], size) == [extent // size, 3]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), sizes)
def test_a_replica_is_whole(shape: list[int], size: int):
    assert Replica.is_replica and Replica.axis(len(shape)) is None
    assert Replica.shard_shape(shape, size) == shape


@settings(max_examples=20)
@given(st.integers(1, 4))
def test_rows_and_columns(dimensions: int):
    assert (FullRow.axis(dimensions), FullCol.axis(dimensions)) == (0, dimensions - 1)


def test_large_shapes_are_sampled():
    shape, calls = [4096, 8192], []

    def columns(i: int, j: int) -> int:
        calls.append((i, j))
        return j // 2048

    assert from_function(columns, shape, 4) == Layout(dim=1)
    assert len(calls) < 40_000


def test_a_function_of_both_dimensions_inside():
    with pytest.raises(LayoutError, match="not a block or cyclic split of dimension 0"):
        from_function(lambda i, j: (i // 2 + (i > 0 and j == 3)) % 4, [8, 8], 4)


@pytest.mark.parametrize(
    "function", [lambda i: i // 3, lambda i: i // 2 % 4 + 1, lambda i: 3 - i // 3, lambda i: i % 3, lambda i: -i]
)
def test_unequal_or_permuted_shares_are_refused(function):
    with pytest.raises(LayoutError, match="indices 0.. go to units"):
        from_function(function, [16], 4)


def test_symbolic_extents():
    n, units = ir.Var("n", "int32"), ir.Var("units", "int32")
    assert [str(e) for e in FullRow.shard_shape([n, 4], 4)] == ["n // 4", "4"]
    assert [str(e) for e in FullCol.shard_shape([8, n], units)] == ["8", "n // units"]
    assert str(FullRow.shard_shape([8], units)[0]) == "8 // units"
    for shape, size in (([n], 4), ([8], units)):
        with pytest.raises(LayoutError, match="needs constant extents"):
            from_function(lambda i: i % 4, shape, size)


@pytest.mark.parametrize("block", [0, -1, 1.5, "2"])
def test_blocks_are_positive_numbers(block):
    with pytest.raises(LayoutError, match="positive number"):
        Shard(0, block=block)


@pytest.mark.parametrize(("dim", "dimensions"), [(2, 2), (-3, 2), (0, 0)])
def test_a_dimension_that_does_not_exist(dim: int, dimensions: int):
    with pytest.raises(LayoutError, match=f"dimension {dim}.*{dimensions} dimensions"):
        Shard(dim).axis(dimensions)
