# SPDX-License-Identifier: MIT
"""A decode step of decoder layers as a program of grids, one after the other, with collectives of tiles.

Weights are those of `torch.nn.Linear`, (outputs, inputs), with the rank's own heads and columns; products add in
float32, and the residual stream is float32. A task of a product takes a part of K of all sequences, and multiplies it
with tiles of 64 outputs: as many as leave each block one task. The phase behind it adds the parts. A task of attention
takes some keys of a group of heads.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.decode_attention import attend, combine, combined, factor
from tilescale.ops.decode_sizes import COLUMNS, DEPTH, ROWS, THREADS, LayerSizes


@T.macro
def multiply(W: Any, X: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any) -> None:
    """C[part] = X W^T over a part of K, for the outputs of a task."""
    steps = int(X.shape[1]) // DEPTH // int(C.shape[0])
    x = T.alloc((steps, sizes.rows, DEPTH), "bfloat16", level="l1")
    for k, i, j in T.Parallel(steps, sizes.rows, DEPTH):
        x[k, i, j] = T.if_then_else(i < sizes.batch, X[T.min(i, sizes.batch - 1), (part * steps + k) * DEPTH + j], 0)
    accumulate(W, x, C, sizes, layer, task, part)


@T.macro
def accumulate(W: Any, x: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any) -> None:
    """The same with tiles of this part of X."""
    steps, tiles = int(x.shape[0]), sizes.each(int(C.shape[0]), int(W.shape[1]) // ROWS)
    w = T.alloc((ROWS, DEPTH), "bfloat16", level="l1")
    c = T.alloc((ROWS, sizes.rows), "float32", level="l0")
    for tile in T.serial(tiles):
        T.clear(c)
        for k in T.Pipelined(steps, num_stages=4):
            T.copy(W[layer, (task * tiles + tile) * ROWS, (part * steps + k) * DEPTH], w)
            T.gemm(w, x[k, :, :], c, transpose_B=True)
        for i, j in T.Parallel(ROWS, sizes.rows):
            if j < sizes.batch:
                C[part, j, (task * tiles + tile) * ROWS + i] = c[i, j]


@T.macro
def scaled(x: Any, weight: Any, H: Any, squares: Any, layer: Any, row: Any, column: Any, rows: int) -> None:
    """A tile of H = x * weight, and its part of the sum of squares: the norm's factor is applied behind the product."""
    square = T.alloc((rows, COLUMNS), "float32", level="l0")
    total = T.alloc((rows,), "float32", level="l0")
    for i, j in T.Parallel(rows, COLUMNS):
        square[i, j] = x[i, j] * x[i, j]
        H[row + i, column * COLUMNS + j] = x[i, j] * weight[layer, column * COLUMNS + j]
    T.reduce_sum(square, total, dim=1)
    for i in T.Parallel(rows):
        squares[column, row + i] = total[i]


@T.macro
def prepare(X: Any, weight: Any, H: Any, squares: Any, row: Any, column: Any, rows: int) -> None:
    """`scaled` of a tile of the residual stream."""
    x = T.alloc((rows, COLUMNS), "float32", level="l0")
    T.copy(X[row, column * COLUMNS], x)
    scaled(x, weight, H, squares, 0, row, column, rows)


@T.macro
def add_parts(C: Any, X: Any, total: Any, sizes: LayerSizes, row: Any, column: Any, rows: int) -> None:
    """A tile of X + the sum of C's parts of all devices."""
    tile = T.alloc((rows, COLUMNS), "float32", level="l1")
    for i, j in T.Parallel(rows, COLUMNS):
        total[i, j] = X[row + i, column * COLUMNS + j] / sizes.devices
    for part in T.unroll(int(C.shape[0])):
        for i, j in T.Parallel(rows, COLUMNS):
            total[i, j] += C[part, row + i, column * COLUMNS + j]
    if sizes.devices > 1:
        T.copy(total, tile)
        with T.Scale("device"):
            T.allreduce(tile)
        T.copy(tile, total)


@T.macro
def project(W: Any, S: Any, L: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any) -> None:
    """`multiply` of the attention of one sequence over all keys, which each task combines for its part of K."""
    heads = sizes.heads // int(C.shape[0])
    x = T.alloc((heads, sizes.rows, DEPTH), "bfloat16", level="l1")
    o = T.alloc((heads, DEPTH), "float32", level="l0")
    combined(S, L, o, sizes, part * heads, heads, 0)
    for k, i, j in T.Parallel(heads, sizes.rows, DEPTH):
        x[k, i, j] = 0
    for k, j in T.Parallel(heads, DEPTH):
        x[k, 0, j] = o[k, j]
    accumulate(W, x, C, sizes, layer, task, part)


@T.macro
def gate(G: Any, squares: Any, M: Any, sizes: LayerSizes, row: Any, column: Any, rows: int) -> None:
    """A tile of M = silu(first half) * second half of the sum of G's parts."""
    a = T.alloc((rows, COLUMNS), "float32", level="l0")
    b = T.alloc((rows, COLUMNS), "float32", level="l0")
    scale = T.alloc((rows,), "float32", level="l0")
    T.clear(a)
    T.clear(b)
    factor(squares, scale, sizes, row, rows)
    for part in T.unroll(int(G.shape[0])):
        for i, j in T.Parallel(rows, COLUMNS):
            a[i, j] += G[part, row + i, column * COLUMNS + j]
            b[i, j] += G[part, row + i, sizes.inner + column * COLUMNS + j]
    for i, j in T.Parallel(rows, COLUMNS):
        a[i, j] *= scale[i]
        M[row + i, column * COLUMNS + j] = a[i, j] / (1 + T.exp(-a[i, j])) * b[i, j] * scale[i]


def decode_layers(sizes: LayerSizes) -> Any:
    """The program. X is the residual stream before and after, `lengths` counts cached tokens; from H on: workspaces."""
    s, n, values = sizes, sizes.batch, sizes.heads * sizes.width
    high, gated, several = s.each(s.hidden // COLUMNS), s.each(s.inner // COLUMNS), s.each(s.batch, s.heads)
    columns, gates = (s.hidden // COLUMNS, n // high), (s.inner // COLUMNS, n // gated)
    into, out = s.parts(s.projected, s.hidden), s.parts(s.hidden, values)
    up, down = s.parts(2 * s.inner, s.hidden), s.parts(s.hidden, s.inner)

    def tasks(outputs: int, parts: int) -> tuple[int, int]:
        tiles = outputs // ROWS
        return tiles // s.each(parts, tiles), parts

    @T.prim_func
    def decode_layers(
        X: T.Tensor((n, s.hidden), "float32"),
        norm1: T.Tensor((s.layers, s.hidden), "float32"),
        norm2: T.Tensor((s.layers, s.hidden), "float32"),
        heads: T.Tensor((s.layers, 2, s.width), "float32"),
        Wqkv: T.Tensor((s.layers, s.projected, s.hidden), "bfloat16"),
        Wo: T.Tensor((s.layers, s.hidden, values), "bfloat16"),
        Wup: T.Tensor((s.layers, 2 * s.inner, s.hidden), "bfloat16"),
        Wdown: T.Tensor((s.layers, s.hidden, s.inner), "bfloat16"),
        angles: T.Tensor((2, n, s.width // 2), "float32"),
        lengths: T.Tensor((n,), "int32"),
        K: T.Tensor((s.layers, n, s.groups, s.keys, s.width), "bfloat16"),
        V: T.Tensor((s.layers, n, s.groups, s.keys, s.width), "bfloat16"),
        H: T.Tensor((n, s.hidden), "bfloat16"),
        R: T.Tensor((s.hidden // COLUMNS, n), "float32"),
        QKV: T.Tensor((into, n, s.projected), "float32"),
        S: T.Tensor((s.spans + 1, n, s.heads, s.width), "float32"),
        L: T.Tensor((s.spans + 1, n, s.heads, 2), "float32"),
        A: T.Tensor((n, values), "bfloat16"),
        C: T.Tensor((out, n, s.hidden), "float32"),
        P: T.Tensor((n, s.hidden), "float32"),
        G: T.Tensor((up, n, 2 * s.inner), "float32"),
        M: T.Tensor((n, s.inner), "bfloat16"),
        D: T.Tensor((down, n, s.hidden), "float32"),
    ):
        with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
            prepare(X, norm1, H, R, rows * high, column, high)
        for layer in T.serial(s.layers):
            with T.Kernel(device=s.devices, block=tasks(s.projected, into), threads=THREADS) as (task, part):
                multiply(Wqkv, H, QKV, s, layer, task, part)
            with T.Kernel(device=s.devices, block=(s.spans, s.groups, n), threads=THREADS) as (span, group, row):
                attend(QKV, R, heads, angles, lengths, K, V, S, L, s, layer, span, group, row)
            if s.combines_early:
                with T.Kernel(device=s.devices, block=(s.heads // several, n), threads=THREADS) as (head, row):
                    combine(S, L, A, s, head * several, several, row)
            with T.Kernel(device=s.devices, block=tasks(s.hidden, out), threads=THREADS) as (task, part):
                if s.combines_early:
                    multiply(Wo, A, C, s, layer, task, part)
                else:
                    project(Wo, S, L, C, s, layer, task, part)
            with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
                with T.Scale("block"):
                    total = T.alloc((high, COLUMNS), "float32", level="l0")
                    add_parts(C, X, total, s, rows * high, column, high)
                    T.copy(total, P[rows * high, column * COLUMNS])
                    scaled(total, norm2, H, R, layer, rows * high, column, high)
            with T.Kernel(device=s.devices, block=tasks(2 * s.inner, up), threads=THREADS) as (task, part):
                multiply(Wup, H, G, s, layer, task, part)
            with T.Kernel(device=s.devices, block=gates, threads=THREADS) as (column, rows):
                gate(G, R, M, s, rows * gated, column, gated)
            with T.Kernel(device=s.devices, block=tasks(s.hidden, down), threads=THREADS) as (task, part):
                multiply(Wdown, M, D, s, layer, task, part)
            with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
                with T.Scale("block"):
                    result = T.alloc((high, COLUMNS), "float32", level="l0")
                    add_parts(D, P, result, s, rows * high, column, high)
                    T.copy(result, X[rows * high, column * COLUMNS])
                    scaled(result, norm1, H, R, (layer + 1) % s.layers, rows * high, column, high)

    return decode_layers
