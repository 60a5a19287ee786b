# SPDX-License-Identifier: MIT
"""Copies between tiles of different extents: the emulator does what the generated text does, or both refuse them."""

import re

import pytest
import tilelang
import torch
from tilelang import tvm

import tilescale
import tilescale.language as T
from tests.cuda.support import source
from tilescale.errors import ShapeError, UnsupportedError

ROWS, COLUMNS = 8, 16
ALLOCATE = {"shared": T.alloc_shared, "fragment": T.alloc_fragment}


def copied(source, target, given, taken):
    """`tile[:given]` of one memory to `tile[:taken]` of another one, of tiles of 8 x 16."""
    box = ROWS, COLUMNS
    if source == target == "global":

        @T.prim_func
        def between(A: T.Tensor(box, "float32"), B: T.Tensor(box, "float32")):
            with T.Kernel(1, threads=32):
                T.copy(A[: given[0], : given[1]], B[: taken[0], : taken[1]])

        return between
    if source == "global":

        @T.prim_func
        def load(A: T.Tensor(box, "float32"), B: T.Tensor(box, "float32")):
            with T.Kernel(1, threads=32):
                tile = ALLOCATE[target](box, "float32")
                T.copy(B, tile)
                T.copy(A[: given[0], : given[1]], tile[: taken[0], : taken[1]])
                T.copy(tile, B)

        return load
    if target == "global":

        @T.prim_func
        def store(A: T.Tensor(box, "float32"), B: T.Tensor(box, "float32")):
            with T.Kernel(1, threads=32):
                tile = ALLOCATE[source](box, "float32")
                T.copy(A, tile)
                T.copy(tile[: given[0], : given[1]], B[: taken[0], : taken[1]])

        return store

    @T.prim_func
    def move(A: T.Tensor(box, "float32"), B: T.Tensor(box, "float32")):
        with T.Kernel(1, threads=32):
            tile, other = ALLOCATE[source](box, "float32"), ALLOCATE[target](box, "float32")
            T.copy(A, tile)
            T.copy(B, other)
            T.copy(tile[: given[0], : given[1]], other[: taken[0], : taken[1]])
            T.copy(other, B)

    return move


def changed(program):
    """Number of rows and columns of the target that a copy has changed, on the emulator."""
    a, b = torch.rand(ROWS, COLUMNS), torch.full((ROWS, COLUMNS), 7.0)
    tilescale.emulate(program, [a, b])
    new = b != 7
    rows, columns = int(new.any(1).sum()), int(new.any(0).sum())
    assert torch.equal(b[:rows, :columns], a[:rows, :columns]) and int(new.sum()) == rows * columns
    return rows, columns


SMALL, LARGE = (ROWS, 2), (ROWS, 3)
ALIKE = [
    ("global", "global", SMALL, LARGE, SMALL),
    ("global", "global", LARGE, SMALL, LARGE),
    ("global", "shared", SMALL, LARGE, LARGE),
    ("shared", "global", SMALL, LARGE, SMALL),
    ("shared", "global", LARGE, SMALL, LARGE),
    ("fragment", "shared", SMALL, LARGE, SMALL),
    ("shared", "shared", LARGE, SMALL, LARGE),
]
IN_PART = [
    ("global", "fragment", SMALL, LARGE, LARGE),
    ("fragment", "global", LARGE, SMALL, LARGE),
    ("shared", "fragment", SMALL, LARGE, LARGE),
]
"""Stock TileLang distributes the fragment by this copy: copies of all of it move 24 elements, too."""


@pytest.mark.parametrize(("from_", "to", "given", "taken", "moved"), ALIKE)
def test_threads_copy_what_the_nearer_side_has(from_, to, given, taken, moved):
    program = copied(from_, to, given, taken)
    assert changed(program) == moved
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        stock = tilelang.lower(program, target=target).kernel_source
    kernel = stock[stock.rindex("__launch_bounds__") :]
    assert kernel in source(program)
    same = copied(from_, to, moved, moved)
    assert kernel.partition("{")[2] in source(same), "what TileLang makes of equal extents"


@pytest.mark.parametrize(("from_", "to", "given", "taken", "moved"), IN_PART)
def test_copies_that_make_a_fragment_lose_elements_are_refused(from_, to, given, taken, moved):
    program = copied(from_, to, given, taken)
    assert changed(program) == moved
    with pytest.raises(UnsupportedError, match="in registers would be lost"):
        source(program)


def test_bulk_copies_that_stock_refuses_do_the_same():
    program = copied("shared", "global", (4, COLUMNS), (ROWS, COLUMNS))
    assert changed(program) == (4, COLUMNS)
    assert "tma_store" in source(program)


@pytest.mark.parametrize(
    ("from_", "to", "given", "taken"),
    [
        ("global", "shared", LARGE, SMALL),
        ("global", "fragment", LARGE, SMALL),
        ("shared", "fragment", LARGE, SMALL),
        ("global", "global", SMALL, (ROWS, 1)),
        ("shared", "global", (ROWS, 1), SMALL),
        ("global", "shared", (ROWS, 1), SMALL),
    ],
)
@pytest.mark.parametrize("run", [changed, source], ids=["emulator", "cuda"])
def test_what_tilelang_cannot_copy_is_refused_alike(from_, to, given, taken, run):
    with pytest.raises(ShapeError, match="a copy between tiles of different extents: .* and .*") as caught:
        run(copied(from_, to, given, taken))
    assert "T.copy" in str(caught.value.where[0])


@pytest.mark.parametrize("rows", [3, 8])
def test_extents_of_which_one_is_known_at_the_call_are_those_of_the_tile(rows):
    """As TileLang has it: what is beyond the tensor is 0."""

    @T.prim_func
    def program(n: T.int32, A: T.Tensor((ROWS, COLUMNS), "float32"), B: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((4, COLUMNS), "float32")
            T.copy(A[0:n, 0:COLUMNS], tile)
            T.copy(tile, B[0, 0])

    a, b = torch.rand(ROWS, COLUMNS), torch.full((ROWS, COLUMNS), 7.0)
    tilescale.emulate(program, [rows, a, b])
    assert torch.equal(b[:4], a[:4]) and (b[4:] == 7).all()
    assert not re.search(r"\bn\b", source(program)), "what TileLang leaves out is not copied"
