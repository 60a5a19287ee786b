# SPDX-License-Identifier: MIT
"""Elementwise work between the GEMMs of a decode step, on tiles of registers.

`place` is of a row of a tile the sequence and the column of 128 features.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.decode_attention import factor
from tilescale.ops.decode_float8 import split
from tilescale.ops.decode_sizes import COLUMNS, LayerSizes


@T.macro
def add_parts(C: Any, X: Any, total: Any, sizes: LayerSizes, place: Any, exchanged: bool) -> None:
    """A tile of X + the sum of C's parts of all devices, or of parts that are these sums already."""
    rows = int(total.shape[0])
    for r, j in T.Parallel(rows, COLUMNS):
        total[r, j] = X[place(r)[0], place(r)[1] * COLUMNS + j] / (1 if exchanged else sizes.devices)
    for part in T.unroll(int(C.shape[0])):
        for r, j in T.Parallel(rows, COLUMNS):
            total[r, j] += C[part, place(r)[0], place(r)[1] * COLUMNS + j]
    if sizes.devices > 1 and not exchanged:
        tile = T.alloc((rows, COLUMNS), "float32", level="l1")
        T.copy(total, tile)
        with T.Scale("device"):
            T.allreduce(tile)
        T.copy(tile, total)


@T.macro
def load_norm(weight: Any, layer: Any, w: Any, place: Any) -> None:
    """The weights of a norm for a tile: they are in memory, and depend on no other task."""
    for r, j in T.Parallel(int(w.shape[0]), COLUMNS):
        w[r, j] = weight[layer, place(r)[1] * COLUMNS + j]


@T.macro
def scaled(x: Any, w: Any, squares: Any, place: Any, is_mine: Any) -> None:
    """x *= w, and its part of the sum of squares: the norm's factor is applied behind the GEMM."""
    rows = int(x.shape[0])
    square = T.alloc((rows, COLUMNS), "float32", level="l0")
    total = T.alloc((rows,), "float32", level="l0")
    for r, j in T.Parallel(rows, COLUMNS):
        square[r, j] = x[r, j] * x[r, j]
        x[r, j] *= w[r, j]
    T.reduce_sum(square, total, dim=1)
    if is_mine:
        for r in T.Parallel(rows):
            squares[place(r)[1], place(r)[0]] = total[r]


@T.macro
def add_and_scale(
    C: Any, X: Any, P: Any, weight: Any, squares: Any, sizes: LayerSizes, layer: Any, o: Any, place: Any, is_first: Any
) -> None:  # fmt: skip
    """Activations behind a norm, as tasks of a GEMM make them: the first one keeps P = X + the sum of C's parts."""
    w = T.alloc((int(o.shape[0]), COLUMNS), "float32", level="l0")
    load_norm(weight, layer, w, place)
    add_parts(C, X, o, sizes, place, True)
    if is_first:
        put(o, P, place)
    scaled(o, w, squares, place, is_first)


@T.macro
def begin_or_add(
    D: Any, P: Any, X: Any, weight: Any, squares: Any, sizes: LayerSizes, layer: Any, o: Any, place: Any, is_first: Any
) -> None:  # fmt: skip
    """The same for the first GEMM of a layer, whose residual stream is X: given for the first layer."""
    w = T.alloc((int(o.shape[0]), COLUMNS), "float32", level="l0")
    load_norm(weight, layer, w, place)
    if layer == 0:
        for r, j in T.Parallel(int(o.shape[0]), COLUMNS):
            o[r, j] = X[place(r)[0], place(r)[1] * COLUMNS + j]
    else:
        add_parts(D, P, o, sizes, place, True)
        if is_first:
            put(o, X, place)
    scaled(o, w, squares, place, is_first)


@T.macro
def put(x: Any, X: Any, place: Any) -> None:
    """Store a tile; `place` is of a row of it the sequence and the column."""
    width = int(x.shape[1])
    for r, j in T.Parallel(int(x.shape[0]), width):
        X[place(r)[0], place(r)[1] * width + j] = x[r, j]


@T.macro
def keep(x: Any, X: Any, of_X: Any, sizes: LayerSizes, place: Any) -> None:
    """Store a tile as activations of a GEMM."""
    if sizes.is_float8:
        split(x, X, of_X, sizes, place)
    else:
        put(x, X, place)


@T.macro
def gate(G: Any, squares: Any, sizes: LayerSizes, o: Any, place: Any, is_first: Any) -> None:
    """silu(first half) * second half of the sum of G's parts."""
    rows = int(o.shape[0])
    b = T.alloc((rows, COLUMNS), "float32", level="l0")
    scale = T.alloc((rows,), "float32", level="l0")
    T.clear(o)
    T.clear(b)
    factor(squares, scale, sizes, lambda r: place(r)[0])
    for part in T.unroll(int(G.shape[0])):
        for r, j in T.Parallel(rows, COLUMNS):
            o[r, j] += G[part, place(r)[0], place(r)[1] * COLUMNS + j]
            b[r, j] += G[part, place(r)[0], sizes.inner + place(r)[1] * COLUMNS + j]
    for r, j in T.Parallel(rows, COLUMNS):
        o[r, j] *= scale[r]
        o[r, j] = o[r, j] / (1 + T.exp(-o[r, j])) * b[r, j] * scale[r]
