# SPDX-License-Identifier: MIT
"""Fragments of which TileLang's layout leaves out elements that the program uses: an error with the line."""

from typing import Any

import pytest
import tilelang

import tilescale
import tilescale.language as T
from tests.cuda.support import source
from tilescale.errors import UnsupportedError

N = 256


def program(body: Any, shape: tuple[int, ...] = (N,), scoped: bool = True) -> Any:
    """A macro of two fragments; the first one has X before it, and goes to Z behind it."""

    @T.prim_func
    def on_fragments(X: T.Tensor(shape, "float32"), Z: T.Tensor(shape, "float32")):
        if scoped:
            with T.Kernel(device=1, block=1, threads=128), T.Scale("block"):
                t = T.alloc_fragment(shape, "float32")
                u = T.alloc_fragment(shape, "float32")
                T.copy(X, t)
                body(t, u)
                T.copy(t, Z)
        else:
            with T.Kernel(1, threads=128):
                t = T.alloc_fragment(shape, "float32")
                u = T.alloc_fragment(shape, "float32")
                T.copy(X, t)
                body(t, u)
                T.copy(t, Z)

    return on_fragments


@T.macro
def half(t, u):
    for i in T.Parallel(N // 2):
        t[i] = t[i] + 1  # the line


@T.macro
def backwards(t, u):
    for i in T.Parallel(N):
        u[i] = t[N - 1 - i]  # the line


@T.macro
def each_twice(t, u):
    for i in T.Parallel(N):
        t[i // 2] = i  # the line


@T.macro
def some_columns(t, u):
    for i, j in T.Parallel(16, 8):
        t[i, j] = 2 * t[i, j]  # the line


@pytest.mark.parametrize(
    ("body", "shape"), [(half, (N,)), (backwards, (N,)), (each_twice, (N,)), (some_columns, (16, 16))]
)
@pytest.mark.parametrize("scoped", [True, False])
def test_elements_that_would_be_lost_are_an_error(body: Any, shape: tuple[int, ...], scoped: bool):
    with pytest.raises(UnsupportedError, match="elements of the tile t in registers would be lost") as caught:
        _ = tilescale.compile(program(body, shape, scoped), machine="h200-sxm-8").source
    assert "test_partial_layouts.py" in str(caught.value)
    assert "declare fewer elements" in str(caught.value)


@T.macro
def in_order(t, u):
    for i in T.Parallel(N):
        u[i] = t[i]


@T.macro
def one_for_all(t, u):
    for i in T.Parallel(N):
        u[i] = t[0]


@T.macro
def a_part_of_another(t, u):
    """Half of `u` is never used."""
    for i in T.Parallel(N // 2):
        u[i] = 1.0
    for i in T.Parallel(N // 2):
        u[i] = u[i] + 1


@T.macro
def some_columns_of_another(t, u):
    for i, j in T.Parallel(16, 8):
        u[i, j] = 1.0
    for i, j in T.Parallel(16, 8):
        u[i, j] = u[i, j] + 1


@pytest.mark.parametrize(
    ("body", "shape"),
    [(in_order, (N,)), (one_for_all, (N,)), (a_part_of_another, (N,)), (some_columns_of_another, (16, 16))],
)
def test_other_fragments_compile(body: Any, shape: tuple[int, ...]):
    assert "(Z + " in source(program(body, shape))


def test_tiles_of_one_name_have_their_own_layouts():
    """The layout of the tile in shared memory is not taken for that of the one in registers."""

    @T.prim_func
    def on_both(X: T.Tensor((64, 64), "float32"), Z: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            t = T.alloc_shared((64, 64), "float32")
            T.annotate_layout({t: tilelang.layout.make_swizzled_layout(t)})
            T.copy(X, t)
            T.copy(t, Z)
            t = T.alloc_fragment((64, 64), "float32")
            T.copy(X, t)
            for i, j in T.Parallel(64, 32):
                t[i, j] = t[i, j] + 1
            T.copy(t, Z)

    with pytest.raises(UnsupportedError, match="elements of the tile t in registers would be lost"):
        _ = tilescale.compile(on_both, machine="h200-sxm-8").source
