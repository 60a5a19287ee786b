# SPDX-License-Identifier: MIT
"""Activations of bfloat16's precision and float8 weights, multiplied by tensor cores without converting a weight.

An activation is the sum of two float8 numbers, its terms, times a factor of 128 features of its row:
x = factor * (first + second / 16). Each term has 4 significant bits, so both have the 8 of bfloat16. They are two rows
of the activations' tile, of which tensor cores take 8 at least. So a GEMM still takes the time of reading its
weights, which is half. Sums of 128 products are scaled and added in float32.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.decode_sizes import DEPTH, FLOAT8, LayerSizes

END, LEAST, FINER = 448.0, 1e-30, 16.0
"""The largest float8 number; the least largest magnitude of a row's features; what second terms are multiplied by."""


def first(x: Any, inverse: Any) -> Any:
    """The first term of an activation, with one over its factor."""
    return T.cast(x * inverse, FLOAT8)


def second(x: Any, inverse: Any) -> Any:
    """The second term of an activation."""
    return T.cast((x * inverse - T.cast(first(x, inverse), "float32")) * FINER, FLOAT8)


@T.macro
def measure(x: Any, factor: Any, inverse: Any) -> None:
    """The factors of a tile's rows, and one over each."""
    T.reduce_absmax(x, factor, dim=1)
    for i in T.Parallel(int(x.shape[0])):
        factor[i] = T.max(factor[i], LEAST) / END
        inverse[i] = 1 / factor[i]


@T.macro
def split(x: Any, X: Any, of_X: Any, sizes: LayerSizes, place: Any) -> None:
    """Store a tile of 128 features as the two terms of activations; `place` is of a row the sequence and the column."""
    rows = int(x.shape[0])
    factor = T.alloc((rows,), "float32", level="l0")
    inverse = T.alloc((rows,), "float32", level="l0")
    measure(x, factor, inverse)
    for i in T.Parallel(rows):
        of_X[place(i)[1], place(i)[0]] = factor[i]
    for i, j in T.Parallel(rows, DEPTH):
        X[place(i)[0], place(i)[1] * DEPTH + j] = first(x[i, j], inverse[i])
        X[sizes.batch + place(i)[0], place(i)[1] * DEPTH + j] = second(x[i, j], inverse[i])


@T.macro
def split_on_chip(x: Any, tiles: Any, of_x: Any, sizes: LayerSizes, row: Any) -> None:
    """The two terms of 128 features of a sequence in each row of x, as rows of tiles, whose other rows are zero.

    `row` gives the number of a row of x among the rows of activations.
    """
    n, steps, rows, held = sizes.batch, int(tiles.shape[0]), int(tiles.shape[1]), int(x.shape[0])
    factor = T.alloc((held,), "float32", level="l0")
    inverse = T.alloc((held,), "float32", level="l0")
    measure(x, factor, inverse)
    for r in T.Parallel(held):
        of_x[row(r) // n, row(r) % n] = factor[r]
        of_x[row(r) // n, n + row(r) % n] = factor[r] / FINER
    if rows > 2 * n:
        for k, i in T.Parallel(steps, rows - 2 * n):
            of_x[k, 2 * n + i] = 0
    for r, j in T.Parallel(held, DEPTH):
        tiles[row(r) // n, row(r) % n, j] = first(x[r, j], inverse[r])
        tiles[row(r) // n, n + row(r) % n, j] = second(x[r, j], inverse[r])


@T.macro
def load_factors(of_X: Any, of_x: Any, sizes: LayerSizes, part: Any) -> None:
    """The factors of a part of K for each row of the activations' tiles."""
    steps, n = int(of_x.shape[0]), sizes.batch
    for k, i in T.Parallel(steps, sizes.rows):
        finer = T.if_then_else(i < n, 1.0, 1 / FINER)
        of_x[k, i] = T.if_then_else(i < 2 * n, of_X[part * steps + k, i % n] * finer, 0)


@T.macro
def load_scales(of_W: Any, of_w: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any) -> None:
    """The scales of a task's weights: of each tile in each step, or of each of its rows."""
    tiles, each = int(of_w.shape[0]), int(of_w.shape[1])
    for tile, k in T.Parallel(tiles, each):
        if sizes.squares:
            of_w[tile, k] = of_W[layer, task * tiles + tile, part * each + k]
        else:
            of_w[tile, k] = of_W[layer, (task * tiles + tile) * each + k, 0]


@T.macro
def add_scaled(w: Any, x: Any, of_x: Any, of_w: Any, c: Any, sizes: LayerSizes, tile: Any, k: Any) -> None:
    """c += a tile of weights @ the activations of a step, with their factors."""
    rows = int(x.shape[1])
    product = T.alloc((sizes.tile_rows, rows), "float32", level="l0")
    T.gemm(w, x[k, :, :], product, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(sizes.tile_rows, rows):
        if sizes.squares:
            c[i, j] += product[i, j] * (of_x[k, j] * of_w[tile, k])
        else:
            c[i, j] += product[i, j] * of_x[k, j]
