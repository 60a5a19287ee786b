# SPDX-License-Identifier: MIT
"""A decode step of one decoder layer as a program of grids, one after the other, with collectives of tiles.

Weights are those of `torch.nn.Linear`, (outputs, inputs), with the rank's own heads and columns; products add in
float32, and the residual stream is float32. A task of a product takes a part of K of all sequences, and multiplies it
with tiles of 64 outputs: as many as leave each block one task. The phase behind it adds the parts. A task of attention
takes some keys of a group of heads.
"""

from dataclasses import dataclass
from typing import Any

import tilescale.language as T

ROWS, DEPTH, THREADS = 64, 128, 128
"""Outputs of a tile of a product; elements of K in a step; threads of a block."""

SPAN, QUERIES, COLUMNS = 64, 64, 128
"""Keys of a task of attention, its rows of queries, padded; features of a task of elementwise phases."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer on each rank: those of Llama 3 8B on two.

    Attributes:
        batch: sequences, 16 at most.
        keys: cached tokens of each, the new one included.
        splits: parts of K of the four products.
        layers: decoder layers, one after the other.
        blocks: of the launch: SMs of a device.
    """

    batch: int = 1
    devices: int = 2
    hidden: int = 4096
    heads: int = 16
    groups: int = 4
    width: int = 128
    inner: int = 7168
    keys: int = 1024
    splits: tuple[int, int, int, int] = (8, 2, 4, 2)
    layers: int = 1
    blocks: int = 132

    @property
    def rows(self) -> int:
        """Rows of activations: what tensor cores take at once."""
        return 8 if self.batch <= 8 else 16

    @property
    def scale(self) -> float:
        """Factor of scores whose exponentials are powers of two."""
        return 1.4426950408889634 / self.width**0.5

    @property
    def tiles(self) -> int:
        """Tiles of keys of a task of attention: as many as leave each block a task."""
        return self.each(self.groups * self.batch, self.keys // SPAN)

    @property
    def spans(self) -> int:
        """Tasks of attention of a group of heads of a sequence."""
        return self.keys // SPAN // self.tiles

    def each(self, tasks: int, count: int = 0) -> int:
        """Items of `count`, or rows, of one task, such that `tasks` for each of these parts fit the blocks at once."""
        count = count or self.batch
        sizes = [n for n in range(1, count + 1) if count % n == 0]
        return next((n for n in sizes if tasks * count // n <= self.blocks), count)

    def tasks(self, outputs: int, splits: int) -> tuple[int, int]:
        """The grid of a product."""
        tiles = outputs // ROWS
        return tiles // self.each(splits, tiles), splits

    @property
    def projected(self) -> int:
        """Features of queries, keys and values."""
        return (self.heads + 2 * self.groups) * self.width


@T.macro
def multiply(W: Any, X: Any, C: Any, sizes: Sizes, layer: Any, task: Any, part: Any, splits: int) -> None:
    """C[part] = X W^T over a part of K, for the outputs of a task."""
    steps = int(X.shape[1]) // DEPTH // splits
    x = T.alloc((steps, sizes.rows, DEPTH), "bfloat16", level="l1")
    for k, i, j in T.Parallel(steps, sizes.rows, DEPTH):
        x[k, i, j] = T.if_then_else(i < sizes.batch, X[T.min(i, sizes.batch - 1), (part * steps + k) * DEPTH + j], 0)
    accumulate(W, x, C, sizes, layer, task, part, splits)


@T.macro
def accumulate(W: Any, x: Any, C: Any, sizes: Sizes, layer: Any, task: Any, part: Any, splits: int) -> None:
    """The same with tiles of this part of X."""
    steps, tiles = int(x.shape[0]), sizes.each(splits, int(W.shape[1]) // ROWS)
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
def factor(squares: Any, scale: Any, row: Any, rows: int, features: int) -> None:
    """The factors of the norms of some rows."""
    T.clear(scale)
    for column in T.unroll(features // COLUMNS):
        for i in T.Parallel(rows):
            scale[i] += squares[column, row + i]
    for i in T.Parallel(rows):
        scale[i] = T.rsqrt(scale[i] / features + 1e-5)


@T.macro
def prepare(X: Any, weight: Any, H: Any, squares: Any, row: Any, column: Any, rows: int) -> None:
    """`scaled` of a tile of the residual stream."""
    x = T.alloc((rows, COLUMNS), "float32", level="l0")
    T.copy(X[row, column * COLUMNS], x)
    scaled(x, weight, H, squares, 0, row, column, rows)


@T.macro
def add_parts(C: Any, X: Any, total: Any, sizes: Sizes, row: Any, column: Any, rows: int, parts: int) -> None:
    """A tile of X + the sum of C's parts of all devices."""
    tile = T.alloc((rows, COLUMNS), "float32", level="l1")
    for i, j in T.Parallel(rows, COLUMNS):
        total[i, j] = X[row + i, column * COLUMNS + j] / sizes.devices
    for part in T.unroll(parts):
        for i, j in T.Parallel(rows, COLUMNS):
            total[i, j] += C[part, row + i, column * COLUMNS + j]
    if sizes.devices > 1:
        T.copy(total, tile)
        with T.Scale("device"):
            T.allreduce(tile)
        T.copy(tile, total)


@T.macro
def rotate(
    QKV: Any, squares: Any, angles: Any, q: Any, given: Any, turned: Any, sizes: Sizes, group: Any, row: Any
) -> None:  # fmt: skip
    """A group's queries, key and value as projected, the first two also rotated; the queries once more as a tile."""
    s, half, each = sizes, sizes.width // 2, sizes.heads // sizes.groups
    fresh = T.alloc((each + 2, s.width), "float32", level="l0")
    scale = T.alloc((1,), "float32", level="l0")
    factor(squares, scale, row, 1, s.hidden)
    T.clear(fresh)
    for split in T.unroll(s.splits[0]):
        for i, j in T.Parallel(each + 2, s.width):
            head = T.if_then_else(i < each, group * each + i, s.heads + (i - each) * s.groups + group)
            fresh[i, j] += QKV[split, row, head * s.width + j]
    for i, j in T.Parallel(each + 2, s.width):
        given[i, j] = fresh[i, j] * scale[0]
    for i, j in T.Parallel(each + 1, half):
        turned[i, j] = given[i, j] * angles[0, row, j] - given[i, half + j] * angles[1, row, j]
        turned[i, half + j] = given[i, half + j] * angles[0, row, j] + given[i, j] * angles[1, row, j]
    for i, j in T.Parallel(QUERIES, s.width):
        q[i, j] = T.if_then_else(i < each, turned[T.min(i, each - 1), j], 0)


@T.macro
def attend_to_itself(
    at: Any, K: Any, V: Any, S: Any, L: Any, given: Any, turned: Any, sizes: Sizes, layer: Any, group: Any, row: Any
) -> None:  # fmt: skip
    """The part of a new token in its attention; its key and value are cached."""
    s, each = sizes, sizes.heads // sizes.groups
    product = T.alloc((each, s.width), "float32", level="l0")
    own = T.alloc((each,), "float32", level="l0")
    for i, j in T.Parallel(each, s.width):
        product[i, j] = turned[i, j] * turned[each, j]
        S[s.spans, row, group * each + i, j] = given[each + 1, j]
    T.reduce_sum(product, own, dim=1)
    for i in T.Parallel(each):
        L[s.spans, row, group * each + i, 0] = own[i] * s.scale
        L[s.spans, row, group * each + i, 1] = 1
    for j in T.Parallel(s.width):
        K[layer, row, group, at[row], j] = turned[each, j]
        V[layer, row, group, at[row], j] = given[each + 1, j]


@T.macro
def attend(
    QKV: Any, squares: Any, angles: Any, at: Any, K: Any, V: Any, S: Any, L: Any, sizes: Sizes,
    layer: Any, span: Any, group: Any, row: Any,
) -> None:  # fmt: skip
    """A group's attention over some of its cached keys: not normalized, with the maximum and the sum of each head.

    The task rotates the group's queries. That of the new token caches its key and value, and its attention to itself is
    one more part.
    """
    s, each, tiles = sizes, sizes.heads // sizes.groups, sizes.tiles
    q = T.alloc((QUERIES, s.width), "bfloat16", level="l1")
    k = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    v = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    given = T.alloc((each + 2, s.width), "float32", level="l1")
    turned = T.alloc((each + 1, s.width), "float32", level="l1")
    found = T.alloc((each, s.width), "float32", level="l1")
    score = T.alloc((QUERIES, SPAN), "float32", level="l0")
    weight = T.alloc((QUERIES, SPAN), "bfloat16", level="l0")
    o = T.alloc((QUERIES, s.width), "float32", level="l0")
    peak = T.alloc((QUERIES,), "float32", level="l0")
    most = T.alloc((QUERIES,), "float32", level="l0")
    before = T.alloc((QUERIES,), "float32", level="l0")
    part = T.alloc((QUERIES,), "float32", level="l0")
    total = T.alloc((QUERIES,), "float32", level="l0")
    first = span * tiles * SPAN
    if tiles == 1:
        T.copy(K[layer, row, group, first : first + SPAN, :], k)
        T.copy(V[layer, row, group, first : first + SPAN, :], v)
    rotate(QKV, squares, angles, q, given, turned, s, group, row)
    T.fill(most, -1e30)
    T.clear(total)
    T.clear(o)
    for tile in T.Pipelined(tiles, num_stages=2) if tiles > 1 else T.serial(1):
        if tiles > 1:
            T.copy(K[layer, row, group, first + tile * SPAN : first + (tile + 1) * SPAN, :], k)
            T.copy(V[layer, row, group, first + tile * SPAN : first + (tile + 1) * SPAN, :], v)
        T.clear(score)
        T.gemm(q, k, score, transpose_B=True)
        for i, j in T.Parallel(QUERIES, SPAN):
            score[i, j] = T.if_then_else(first + tile * SPAN + j < at[row], score[i, j] * s.scale, -1e30)
        T.reduce_max(score, peak, dim=1)
        for i in T.Parallel(QUERIES):
            before[i] = most[i]
            most[i] = T.max(most[i], peak[i])
        for i, j in T.Parallel(QUERIES, SPAN):
            score[i, j] = T.exp2(score[i, j] - most[i])
        T.reduce_sum(score, part, dim=1)
        for i in T.Parallel(QUERIES):
            total[i] = total[i] * T.exp2(before[i] - most[i]) + part[i]
        T.copy(score, weight)
        for i, j in T.Parallel(QUERIES, s.width):
            o[i, j] *= T.exp2(before[i] - most[i])
        T.gemm(weight, v, o)
    for i, j in T.Parallel(QUERIES, s.width):
        if i < each:
            found[i, j] = o[i, j]
    for i in T.Parallel(QUERIES):
        if i < each:
            L[span, row, group * each + i, 0] = most[i]
            L[span, row, group * each + i, 1] = total[i]
    for i, j in T.Parallel(each, s.width):
        S[span, row, group * each + i, j] = found[i, j]
    if at[row] // (tiles * SPAN) == span:
        attend_to_itself(at, K, V, S, L, given, turned, s, layer, group, row)


@T.macro
def combined(S: Any, L: Any, o: Any, sizes: Sizes, first: Any, heads: int, row: Any) -> None:
    """Some heads' attention over all keys, (heads, width)."""
    s = sizes
    most = T.alloc((heads,), "float32", level="l0")
    total = T.alloc((heads,), "float32", level="l0")
    T.fill(most, -1e30)
    T.clear(total)
    T.clear(o)
    for span in T.unroll(s.spans + 1):
        for i in T.Parallel(heads):
            most[i] = T.max(most[i], L[span, row, first + i, 0])
    for span in T.unroll(s.spans + 1):
        for i in T.Parallel(heads):
            total[i] += T.exp2(L[span, row, first + i, 0] - most[i]) * L[span, row, first + i, 1]
        for i, j in T.Parallel(heads, s.width):
            o[i, j] += T.exp2(L[span, row, first + i, 0] - most[i]) * S[span, row, first + i, j]
    for i, j in T.Parallel(heads, s.width):
        o[i, j] = o[i, j] / total[i]


@T.macro
def combine(S: Any, L: Any, A: Any, sizes: Sizes, first: Any, heads: int, row: Any) -> None:
    """Some heads' attention over all keys."""
    o = T.alloc((heads, sizes.width), "float32", level="l0")
    combined(S, L, o, sizes, first, heads, row)
    for i, j in T.Parallel(heads, sizes.width):
        A[row, (first + i) * sizes.width + j] = o[i, j]


@T.macro
def project(W: Any, S: Any, L: Any, C: Any, sizes: Sizes, layer: Any, task: Any, part: Any, splits: int) -> None:
    """`multiply` of the attention of one sequence over all keys, which each task combines for its part of K."""
    heads = sizes.heads // splits
    x = T.alloc((heads, sizes.rows, DEPTH), "bfloat16", level="l1")
    o = T.alloc((heads, DEPTH), "float32", level="l0")
    combined(S, L, o, sizes, part * heads, heads, 0)
    for k, i, j in T.Parallel(heads, sizes.rows, DEPTH):
        x[k, i, j] = 0
    for k, j in T.Parallel(heads, DEPTH):
        x[k, 0, j] = o[k, j]
    accumulate(W, x, C, sizes, layer, task, part, splits)


@T.macro
def gate(G: Any, squares: Any, M: Any, sizes: Sizes, row: Any, column: Any, rows: int) -> None:
    """A tile of M = silu(first half) * second half of the sum of G's parts."""
    a = T.alloc((rows, COLUMNS), "float32", level="l0")
    b = T.alloc((rows, COLUMNS), "float32", level="l0")
    scale = T.alloc((rows,), "float32", level="l0")
    T.clear(a)
    T.clear(b)
    factor(squares, scale, row, rows, sizes.hidden)
    for part in T.unroll(sizes.splits[2]):
        for i, j in T.Parallel(rows, COLUMNS):
            a[i, j] += G[part, row + i, column * COLUMNS + j]
            b[i, j] += G[part, row + i, sizes.inner + column * COLUMNS + j]
    for i, j in T.Parallel(rows, COLUMNS):
        a[i, j] *= scale[i]
        M[row + i, column * COLUMNS + j] = a[i, j] / (1 + T.exp(-a[i, j])) * b[i, j] * scale[i]


def decode_layer(sizes: Sizes) -> Any:
    """The program. X is the residual stream before and after; the last nine tensors are workspaces."""
    s, n = sizes, sizes.rows
    values, parts = s.heads * s.width, s.spans + 1
    high, gated, several = s.each(s.hidden // COLUMNS), s.each(s.inner // COLUMNS), s.each(s.batch, s.heads)
    first, out, up, down = s.splits
    columns, gates = (s.hidden // COLUMNS, s.batch // high), (s.inner // COLUMNS, s.batch // gated)

    @T.prim_func
    def decode_layer(
        X: T.Tensor((n, s.hidden), "float32"),
        norm1: T.Tensor((s.layers, s.hidden), "float32"),
        norm2: T.Tensor((s.layers, s.hidden), "float32"),
        Wqkv: T.Tensor((s.layers, s.projected, s.hidden), "bfloat16"),
        Wo: T.Tensor((s.layers, s.hidden, values), "bfloat16"),
        Wup: T.Tensor((s.layers, 2 * s.inner, s.hidden), "bfloat16"),
        Wdown: T.Tensor((s.layers, s.hidden, s.inner), "bfloat16"),
        angles: T.Tensor((2, n, s.width // 2), "float32"),
        at: T.Tensor((n,), "int32"),
        K: T.Tensor((s.layers, n, s.groups, s.keys, s.width), "bfloat16"),
        V: T.Tensor((s.layers, n, s.groups, s.keys, s.width), "bfloat16"),
        H: T.Tensor((n, s.hidden), "bfloat16"),
        R: T.Tensor((s.hidden // COLUMNS, n), "float32"),
        QKV: T.Tensor((first, n, s.projected), "float32"),
        S: T.Tensor((parts, n, s.heads, s.width), "float32"),
        L: T.Tensor((parts, n, s.heads, 2), "float32"),
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
            with T.Kernel(device=s.devices, block=s.tasks(s.projected, first), threads=THREADS) as (task, part):
                multiply(Wqkv, H, QKV, s, layer, task, part, first)
            with T.Kernel(device=s.devices, block=(s.spans, s.groups, s.batch), threads=THREADS) as (span, group, row):
                attend(QKV, R, angles, at, K, V, S, L, s, layer, span, group, row)
            if s.batch > 1:
                with T.Kernel(device=s.devices, block=(s.heads // several, s.batch), threads=THREADS) as (head, row):
                    combine(S, L, A, s, head * several, several, row)
            with T.Kernel(device=s.devices, block=s.tasks(s.hidden, out), threads=THREADS) as (task, part):
                if s.batch > 1:
                    multiply(Wo, A, C, s, layer, task, part, out)
                else:
                    project(Wo, S, L, C, s, layer, task, part, out)
            with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
                with T.Scale("block"):
                    total = T.alloc((high, COLUMNS), "float32", level="l0")
                    add_parts(C, X, total, s, rows * high, column, high, out)
                    T.copy(total, P[rows * high, column * COLUMNS])
                    scaled(total, norm2, H, R, layer, rows * high, column, high)
            with T.Kernel(device=s.devices, block=s.tasks(2 * s.inner, up), threads=THREADS) as (task, part):
                multiply(Wup, H, G, s, layer, task, part, up)
            with T.Kernel(device=s.devices, block=gates, threads=THREADS) as (column, rows):
                gate(G, R, M, s, rows * gated, column, gated)
            with T.Kernel(device=s.devices, block=s.tasks(s.hidden, down), threads=THREADS) as (task, part):
                multiply(Wdown, M, D, s, layer, task, part, down)
            with T.Kernel(device=s.devices, block=columns, threads=THREADS) as (column, rows):
                with T.Scale("block"):
                    result = T.alloc((high, COLUMNS), "float32", level="l0")
                    add_parts(D, P, result, s, rows * high, column, high, down)
                    T.copy(result, X[rows * high, column * COLUMNS])
                    scaled(result, norm1, H, R, (layer + 1) % s.layers, rows * high, column, high)

    return decode_layer
