# SPDX-License-Identifier: MIT
"""A decode step of decoder layers as a program of grids, one after the other, with collectives of tiles.

Weights are those of `torch.nn.Linear`, (outputs, inputs), with the rank's own heads and columns; products add in
float32, and the residual stream is float32. A task of a product takes a part of K of all sequences, and multiplies it
with tiles of 64 outputs: as many as leave each block one task. The phase behind it adds the parts. A task of attention
takes some keys of a group of heads.
"""

from typing import Any

import tilescale.language as T
from tilescale.ops.decode_attention import attend, combined, factor
from tilescale.ops.decode_experts import down, gate_up, score
from tilescale.ops.decode_float8 import add_scaled, load_factors, load_scales, split, split_on_chip
from tilescale.ops.decode_sizes import COLUMNS, DEPTH, ROWS, THREADS, TOKENS, LayerSizes


@T.macro
def multiply(
    W: Any, of_W: Any, X: Any, of_X: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any
) -> None:  # fmt: skip
    """C[part] = X W^T over a part of K, for the outputs of a task."""
    n, steps = sizes.terms * sizes.batch, int(X.shape[1]) // DEPTH // (int(C.shape[0]) // sizes.terms)
    x = T.alloc((steps, sizes.rows, DEPTH), sizes.weights, level="l1")
    of_x, of_w = scales_of_tasks(C, sizes, steps)
    if sizes.is_float8:
        load_scales(of_W, of_w, sizes, layer, task, part)
        load_factors(of_X, of_x, sizes, part)
    for k, i, j in T.Parallel(steps, sizes.rows, DEPTH):
        x[k, i, j] = T.if_then_else(i < n, X[T.min(i, n - 1), (part * steps + k) * DEPTH + j], 0)
    accumulate(W, x, of_x, of_w, C, sizes, layer, task, part)


def scales_of_tasks(C: Any, sizes: LayerSizes, steps: int) -> tuple[Any, Any]:
    """Tiles for the factors of activations and for the scales of weights of a task; None without float8."""
    if not sizes.is_float8:
        return None, None
    tiles = sizes.each(int(C.shape[0]) // sizes.terms, int(C.shape[2]) // sizes.tile_rows)
    shape = tiles, steps if sizes.squares else sizes.tile_rows
    return T.alloc((steps, sizes.rows), "float32", level="l1"), T.alloc(shape, "float32", level="l1")


@T.macro
def accumulate(
    W: Any, x: Any, of_x: Any, of_w: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any
) -> None:  # fmt: skip
    """The same with tiles of this part of X."""
    s, steps, terms = sizes, int(x.shape[0]), sizes.terms
    tiles = s.each(int(C.shape[0]) // terms, int(W.shape[1]) // s.tile_rows)
    w = T.alloc((s.tile_rows, DEPTH), s.weights, level="l1")
    c = T.alloc((s.tile_rows, s.rows), "float32", level="l0")
    for tile in T.serial(tiles):
        T.clear(c)
        for k in T.Pipelined(steps, num_stages=4):
            T.copy(W[layer, (task * tiles + tile) * s.tile_rows, (part * steps + k) * DEPTH], w)
            if s.is_float8:
                add_scaled(w, x, of_x, of_w, c, s, tile, k)
            else:
                T.gemm(w, x[k, :, :], c, transpose_B=True)
        if s.is_float8 and not s.squares:
            for i, j in T.Parallel(s.tile_rows, s.rows):
                c[i, j] *= of_w[tile, i]
        for i, j in T.Parallel(s.tile_rows, s.rows):
            if j < terms * s.batch:
                C[part * terms + j // s.batch, j % s.batch, (task * tiles + tile) * s.tile_rows + i] = c[i, j]


@T.macro
def scaled(
    x: Any, weight: Any, H: Any, of_H: Any, squares: Any, sizes: LayerSizes,
    layer: Any, row: Any, column: Any, rows: int,
) -> None:  # fmt: skip
    """A tile of H = x * weight, and its part of the sum of squares: the norm's factor is applied behind the product."""
    square = T.alloc((rows, COLUMNS), "float32", level="l0")
    total = T.alloc((rows,), "float32", level="l0")
    for i, j in T.Parallel(rows, COLUMNS):
        square[i, j] = x[i, j] * x[i, j]
        x[i, j] *= weight[layer, column * COLUMNS + j]
    T.reduce_sum(square, total, dim=1)
    for i in T.Parallel(rows):
        squares[column, row + i] = total[i]
    keep(x, H, of_H, sizes, lambda i: (row + i, column))


@T.macro
def keep(x: Any, X: Any, of_X: Any, sizes: LayerSizes, place: Any) -> None:
    """Store a tile as activations of a product; `place` is of a row of it the sequence and the column."""
    rows, width = int(x.shape[0]), int(x.shape[1])
    if sizes.is_float8:
        split(x, X, of_X, sizes, place)
    else:
        for i, j in T.Parallel(rows, width):
            X[place(i)[0], place(i)[1] * width + j] = x[i, j]


@T.macro
def prepare(
    X: Any, weight: Any, H: Any, of_H: Any, squares: Any, sizes: LayerSizes, row: Any, column: Any, rows: int
) -> None:  # fmt: skip
    """`scaled` of a tile of the residual stream."""
    x = T.alloc((rows, COLUMNS), "float32", level="l0")
    T.copy(X[row, column * COLUMNS], x)
    scaled(x, weight, H, of_H, squares, sizes, 0, row, column, rows)


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
def combine(
    S: Any, L: Any, A: Any, of_A: Any, sizes: LayerSizes, first: Any, heads: int, row: Any
) -> None:  # fmt: skip
    """Some heads' attention over all keys."""
    o = T.alloc((heads, sizes.width), "float32", level="l0")
    combined(S, L, o, sizes, first, heads, row)
    keep(o, A, of_A, sizes, lambda i: (row, first + i))


@T.macro
def project(
    W: Any, of_W: Any, S: Any, L: Any, C: Any, sizes: LayerSizes, layer: Any, task: Any, part: Any
) -> None:  # fmt: skip
    """`multiply` of the attention of one sequence over all keys, which each task combines for its part of K."""
    heads = sizes.heads // (int(C.shape[0]) // sizes.terms)
    x = T.alloc((heads, sizes.rows, DEPTH), sizes.weights, level="l1")
    o = T.alloc((heads, DEPTH), "float32", level="l0")
    of_x, of_w = scales_of_tasks(C, sizes, heads)
    if sizes.is_float8:
        load_scales(of_W, of_w, sizes, layer, task, part)
    combined(S, L, o, sizes, part * heads, heads, 0)
    for k, i, j in T.Parallel(heads, sizes.rows, DEPTH):
        x[k, i, j] = 0
    if sizes.is_float8:
        split_on_chip(o, x, of_x)
    else:
        for k, j in T.Parallel(heads, DEPTH):
            x[k, 0, j] = o[k, j]
    accumulate(W, x, of_x, of_w, C, sizes, layer, task, part)


@T.macro
def gate(
    G: Any, squares: Any, M: Any, of_M: Any, sizes: LayerSizes, row: Any, column: Any, rows: int
) -> None:  # fmt: skip
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
        a[i, j] = a[i, j] / (1 + T.exp(-a[i, j])) * b[i, j] * scale[i]
    keep(a, M, of_M, sizes, lambda i: (row + i, column))


@T.macro
def between(
    C: Any, X: Any, P: Any, weight: Any, router: Any, H: Any, of_H: Any, R: Any, logits: Any,
    sizes: LayerSizes, layer: Any,
) -> None:  # fmt: skip
    """The phase between attention and MLP: the sum of C's parts, its norm, and what the router says of it."""
    s, high = sizes, sizes.each(sizes.hidden // COLUMNS)
    with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch // high), threads=THREADS) as (column, rows):
        with T.Scale("block"):
            total = T.alloc((high, COLUMNS), "float32", level="l0")
            if s.experts:
                scores = T.alloc((s.scores, COLUMNS), "bfloat16", level="l1")
                T.copy(router[layer, 0, column * COLUMNS], scores)
            add_parts(C, X, total, s, rows * high, column, high)
            T.copy(total, P[rows * high, column * COLUMNS])
            scaled(total, weight, H, of_H, R, s, layer, rows * high, column, high)
            if s.experts:
                score(total, scores, logits, s, rows * high, column)


@T.macro
def experts_of_tokens(
    Wup: Any, Wdown: Any, H: Any, logits: Any, R: Any, M: Any, picked: Any, D: Any, sizes: LayerSizes, layer: Any
) -> None:  # fmt: skip
    """The phases of the experts: D has the parts of their sum."""
    s, parts = sizes, int(D.shape[0])
    with T.Kernel(device=s.devices, block=(s.inner // s.gated, s.slots), threads=THREADS) as (column, slot):
        gate_up(Wup, H, logits, R, M, picked, s, layer, column, slot)
    with T.Kernel(device=s.devices, block=(s.hidden // ROWS, parts), threads=THREADS) as (column, part):
        down(Wdown, M, picked, D, s, layer, column, part)


@T.macro
def feed_forward(
    Wup: Any, of_Wup: Any, Wdown: Any, of_Wdown: Any, H: Any, of_H: Any, R: Any, G: Any, M: Any, of_M: Any, D: Any,
    sizes: LayerSizes, layer: Any,
) -> None:  # fmt: skip
    """The phases of an MLP for all tokens: D has the parts of its product."""
    s, gated = sizes, sizes.each(sizes.inner // COLUMNS)
    up, out = (int(parts.shape[0]) // s.terms for parts in (G, D))
    with T.Kernel(device=s.devices, block=s.tasks(2 * s.inner, up), threads=THREADS) as (task, part):
        multiply(Wup, of_Wup, H, of_H, G, s, layer, task, part)
    with T.Kernel(device=s.devices, block=(s.inner // COLUMNS, s.batch // gated), threads=THREADS) as (column, rows):
        gate(G, R, M, of_M, s, rows * gated, column, gated)
    with T.Kernel(device=s.devices, block=s.tasks(s.hidden, out), threads=THREADS) as (task, part):
        multiply(Wdown, of_Wdown, M, of_M, D, s, layer, task, part)


def decode_layers(sizes: LayerSizes) -> Any:
    """The program. X is the residual stream before and after, `lengths` counts cached tokens; from H on: workspaces."""
    s, n, t, values = sizes, sizes.batch, sizes.terms, sizes.heads * sizes.width
    high, several = s.each(s.hidden // COLUMNS), s.each(s.batch, s.heads)
    columns = s.hidden // COLUMNS, n // high
    into, out = s.parts(s.projected, s.hidden), s.parts(s.hidden, values)
    up = s.parts(2 * s.inner, s.hidden)
    split = s.down_parts if s.experts else s.parts(s.hidden, s.inner)
    experts = (s.experts,) if s.experts else ()

    @T.prim_func
    def decode_layers(
        X: T.Tensor((n, s.hidden), "float32"),
        norm1: T.Tensor((s.layers, s.hidden), "float32"),
        norm2: T.Tensor((s.layers, s.hidden), "float32"),
        heads: T.Tensor((s.layers, 2, s.width), "float32"),
        Wqkv: T.Tensor((s.layers, s.projected, s.hidden), s.weights),
        Wo: T.Tensor((s.layers, s.hidden, values), s.weights),
        router: T.Tensor((s.layers, s.scores, s.hidden) if s.experts else (1,), "bfloat16"),
        Wup: T.Tensor((s.layers, *experts, 2 * s.inner, s.hidden), s.weights),
        Wdown: T.Tensor((s.layers, *experts, s.hidden, s.inner), s.weights),
        of_Wqkv: T.Tensor(s.scales(s.projected, s.hidden), "float32"),
        of_Wo: T.Tensor(s.scales(s.hidden, values), "float32"),
        of_Wup: T.Tensor(s.scales(2 * s.inner, s.hidden), "float32"),
        of_Wdown: T.Tensor(s.scales(s.hidden, s.inner), "float32"),
        angles: T.Tensor((2, n, s.width // 2), "float32"),
        lengths: T.Tensor((n,), "int32"),
        block_table: T.Tensor(s.table, "int32"),
        K: T.Tensor(s.cache, "bfloat16"),
        V: T.Tensor(s.cache, "bfloat16"),
        H: T.Tensor((TOKENS if s.experts else t * n, s.hidden), s.weights),
        of_H: T.Tensor(s.factors(s.hidden), "float32"),
        R: T.Tensor((s.hidden // COLUMNS, n), "float32"),
        QKV: T.Tensor((t * into, n, s.projected), "float32"),
        S: T.Tensor((s.spans + 1, n, s.heads, s.width), "float32"),
        L: T.Tensor((s.spans + 1, n, s.heads, 2), "float32"),
        A: T.Tensor((t * n, values), s.weights),
        of_A: T.Tensor(s.factors(values), "float32"),
        C: T.Tensor((t * out, n, s.hidden), "float32"),
        P: T.Tensor((n, s.hidden), "float32"),
        G: T.Tensor((t * up, n, 2 * s.inner), "float32"),
        logits: T.Tensor((s.hidden // COLUMNS, n, s.scores) if s.experts else (1,), "float32"),
        picked: T.Tensor((s.slots + 1,), "int32"),
        M: T.Tensor((s.slots, TOKENS, s.inner) if s.experts else (t * n, s.inner), s.weights),
        of_M: T.Tensor(s.factors(s.inner), "float32"),
        D: T.Tensor((t * split, n, s.hidden), "float32"),
    ):
        with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
            prepare(X, norm1, H, of_H, R, s, rows * high, column, high)
        for layer in T.serial(s.layers):
            with T.Kernel(device=s.devices, block=s.tasks(s.projected, into), threads=THREADS) as (task, part):
                multiply(Wqkv, of_Wqkv, H, of_H, QKV, s, layer, task, part)
            with T.Kernel(device=s.devices, block=(s.spans, s.groups, n), threads=THREADS) as (span, group, row):
                attend(QKV, R, heads, angles, lengths, block_table, K, V, S, L, s, layer, span, group, row)
            if s.combines_early:
                with T.Kernel(device=s.devices, block=(s.heads // several, n), threads=THREADS) as (head, row):
                    combine(S, L, A, of_A, s, head * several, several, row)
            with T.Kernel(device=s.devices, block=s.tasks(s.hidden, out), threads=THREADS) as (task, part):
                if s.combines_early:
                    multiply(Wo, of_Wo, A, of_A, C, s, layer, task, part)
                else:
                    project(Wo, of_Wo, S, L, C, s, layer, task, part)
            between(C, X, P, norm2, router, H, of_H, R, logits, s, layer)
            if s.experts:
                experts_of_tokens(Wup, Wdown, H, logits, R, M, picked, D, s, layer)
            else:
                feed_forward(Wup, of_Wup, Wdown, of_Wdown, H, of_H, R, G, M, of_M, D, s, layer)
            with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
                with T.Scale("block"):
                    result = T.alloc((high, COLUMNS), "float32", level="l0")
                    add_parts(D, P, result, s, rows * high, column, high)
                    T.copy(result, X[rows * high, column * COLUMNS])
                    scaled(result, norm1, H, of_H, R, s, (layer + 1) % s.layers, rows * high, column, high)

    return decode_layers
