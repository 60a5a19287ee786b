# SPDX-License-Identifier: MIT
"""GEMMs of a decode step: a task takes a part of K of all sequences, and multiplies it with tiles of weights.

Weights are those of `torch.nn.Linear`, (outputs, inputs); GEMMs add in float32, and the tasks behind one add its
parts. Activations are loaded, or made by each task from the results of the phase before, which saves a phase.
"""

from collections.abc import Callable
from typing import Any

import tilescale.language as T
from tilescale.ops.decode_float8 import add_scaled, load_factors, load_scales, split_on_chip
from tilescale.ops.decode_sizes import DEPTH, THREADS, LayerSizes


@T.macro
def gemm(
    W: Any, of_W: Any, X: Any, of_X: Any, C: Any, sizes: LayerSizes, layer: Any,
    exchanged: bool, is_made: bool, make: Any,
) -> None:  # fmt: skip
    """The phase of a GEMM: of activations that its tasks make, or of X."""
    s = sizes
    tasks = s.tasks(int(W.shape[1]), int(C.shape[0]))
    with T.Kernel(device=s.devices, block=tasks, threads=THREADS) as (task, part):
        with T.Scale("block"):
            if is_made:
                multiply_made(W, of_W, C, s, layer, task, part, exchanged, make)
            else:
                multiply(W, of_W, X, of_X, C, s, layer, task, part, exchanged)


@T.macro
def multiply(
    W: Any, of_W: Any, X: Any, of_X: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any, exchanged: bool
) -> None:  # fmt: skip
    """C[part] = X W^T over a part of K, for the outputs of a task; `exchanged`: the sum of all devices' GEMMs."""
    n, steps = sizes.terms * sizes.batch, int(X.shape[1]) // DEPTH // int(C.shape[0])
    x = T.alloc((steps, sizes.rows, DEPTH), sizes.weights, level="l1")
    of_x, of_w = scales_of_tasks(C, sizes, steps)
    if sizes.is_float8:
        load_scales(of_W, of_w, sizes, layer, task, part)
        load_factors(of_X, of_x, sizes, part)
    for k, i, j in T.Parallel(steps, sizes.rows, DEPTH):
        x[k, i, j] = T.if_then_else(i < n, X[T.min(i, n - 1), (part * steps + k) * DEPTH + j], 0)
    accumulate(W, x, of_x, of_w, C, sizes, layer, task, part, exchanged)


def held_rows(count: int) -> tuple[int, Callable[[Any], Any]]:
    """The rows of a tile in registers for some rows of activations, and the row of activations that one of them has.

    TileLang's producer doubles the threads of a block, which share one row of 128 features or an even number of rows.
    So the last of an odd number is there twice.
    """
    if count == 1 or count % 2 == 0:
        return count, lambda r: r
    return count + 1, lambda r: T.min(r, count - 1)


@T.macro
def multiply_made(
    W: Any, of_W: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any, exchanged: bool, make: Any
) -> None:  # fmt: skip
    """The same with activations that each task makes: `make(o, place, is_first)` fills registers with its part of K.

    A row of them has a step of K of a sequence: `place` gives the sequence and the step. One task `is_first` of a part.
    """
    n, steps = sizes.batch, int(W.shape[2]) // DEPTH // int(C.shape[0])
    x = T.alloc((steps, sizes.rows, DEPTH), sizes.weights, level="l1")
    held, row = held_rows(steps * n)
    o = T.alloc((held, DEPTH), "float32", level="l0")
    of_x, of_w = scales_of_tasks(C, sizes, steps)
    if sizes.is_float8:
        load_scales(of_W, of_w, sizes, layer, task, part)
    for k, i, j in T.Parallel(steps, sizes.rows, DEPTH):
        x[k, i, j] = 0
    make(o, lambda r: (row(r) % n, part * steps + row(r) // n), task == 0)
    if sizes.is_float8:
        split_on_chip(o, x, of_x, sizes, row)
    else:
        for r, j in T.Parallel(held, DEPTH):
            x[row(r) // n, row(r) % n, j] = o[r, j]
    accumulate(W, x, of_x, of_w, C, sizes, layer, task, part, exchanged)


def scales_of_tasks(C: Any, sizes: LayerSizes, steps: int) -> tuple[Any, Any]:
    """Tiles for the factors of activations and for the scales of weights of a task; None without float8."""
    if not sizes.is_float8:
        return None, None
    tiles = sizes.each(int(C.shape[0]), int(C.shape[2]) // sizes.tile_rows)
    shape = tiles, steps if sizes.squares else sizes.tile_rows
    return T.alloc((steps, sizes.rows), "float32", level="l1"), T.alloc(shape, "float32", level="l1")


@T.macro
def accumulate(
    W: Any, x: Any, of_x: Any, of_w: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any, exchanged: bool
) -> None:  # fmt: skip
    """The same with tiles of this part of the activations."""
    s, steps, high = sizes, int(x.shape[0]), sizes.tile_rows
    tiles = s.each(int(C.shape[0]), int(W.shape[1]) // high)
    w = T.alloc((high, DEPTH), s.weights, level="l1")
    c = T.alloc((high, s.rows), "float32", level="l0")
    if exchanged:
        made = T.alloc((s.batch, tiles * high), "float32", level="l1")
    for tile in T.serial(tiles):
        T.clear(c)
        for k in T.Pipelined(steps, num_stages=4):
            T.copy(W[layer, (task * tiles + tile) * high, (part * steps + k) * DEPTH], w)
            if s.is_float8:
                add_scaled(w, x, of_x, of_w, c, s, tile, k)
            else:
                T.gemm(w, x[k, :, :], c, transpose_B=True)
        if s.is_float8 and not s.squares:
            for i, j in T.Parallel(high, s.rows):
                c[i, j] *= of_w[tile, i]
        if exchanged:
            store(c, s, made, (), tile * high)
        else:
            store(c, s, C, (part,), (task * tiles + tile) * high)
    if exchanged:
        with T.Scale("device"):
            T.allreduce(made)
        for i, j in T.Parallel(s.batch, tiles * high):
            C[part, i, task * tiles * high + j] = made[i, j]


@T.macro
def store(c: Any, sizes: LayerSizes, C: Any, part: tuple[Any, ...], first: Any) -> None:
    """A tile of results, (outputs, rows), as outputs from `first` on; the terms of float8 activations are added."""
    high, n = int(c.shape[0]), sizes.batch
    if sizes.is_float8:
        both = T.alloc((high, sizes.rows + 1), "float32", level="l1")  # columns are in different banks
        for j, i in T.Parallel(high, sizes.rows):
            both[j, i] = c[j, i]
        for i, j in T.Parallel(n, high):
            C[(*part, i, first + j)] = both[j, i] + both[j, n + i]
    else:
        for j, i in T.Parallel(high, sizes.rows):
            if i < n:
                C[(*part, i, first + j)] = c[j, i]
