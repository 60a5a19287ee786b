# SPDX-License-Identifier: MIT
"""A decode step of one decoder layer as a program of grids, one after the other, with collectives of tiles.

Weights are those of `torch.nn.Linear`, (outputs, inputs), with the rank's own heads and columns; products add in
float32, and the residual stream is float32. A task of a product multiplies 64 outputs of a part of K with all
sequences; the phase behind it adds the parts. A task of attention takes some keys of a group of heads.
"""

from dataclasses import dataclass
from typing import Any

import tilescale.language as T

ROWS, DEPTH, THREADS = 64, 128, 128
"""Outputs of a task of a product; elements of K in a step; threads of a block."""

SPAN, QUERIES, COLUMNS = 64, 64, 128
"""Keys of a task of attention, its rows of queries, padded; features of a task of elementwise phases."""

SLAB = 64 << 10
"""Bytes of activations that a block keeps, at most."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer on each rank: those of Llama 3 8B on two.

    Attributes:
        batch: sequences, 16 at most.
        keys: cached tokens of each, the new one included.
        splits: parts of K of the four products.
        layers: decoder layers, one after the other.
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

    @property
    def rows(self) -> int:
        """Rows of activations: what tensor cores take at once."""
        return 8 if self.batch <= 8 else 16

    @property
    def projected(self) -> int:
        """Features of queries, keys and values."""
        return (self.heads + 2 * self.groups) * self.width


@T.macro
def multiply(W: Any, X: Any, C: Any, sizes: Sizes, layer: Any, row: Any, part: Any, splits: int) -> None:
    """C[part, :, row * ROWS ...] = X W^T over a part of K; the block keeps all of X for its next tasks where it can."""
    steps, wide = int(X.shape[1]) // DEPTH // splits, 2 * sizes.rows * int(X.shape[1]) <= SLAB
    kept, first = (splits * steps, 0) if wide else (steps, part * steps)
    x = T.alloc((kept, sizes.rows, DEPTH), "bfloat16", level="l1")
    for k, i, j in T.Parallel(kept, sizes.rows, DEPTH):
        x[k, i, j] = T.if_then_else(i < sizes.batch, X[T.min(i, sizes.batch - 1), (first + k) * DEPTH + j], 0)
    accumulate(W, x, C, sizes, layer, row, part, steps, part * steps - first)


@T.macro
def accumulate(W: Any, x: Any, C: Any, sizes: Sizes, layer: Any, row: Any, part: Any, steps: int, begin: Any) -> None:
    """The same with tiles of X from `begin` on."""
    w = T.alloc((ROWS, DEPTH), "bfloat16", level="l1")
    c = T.alloc((ROWS, sizes.rows), "float32", level="l0")
    T.clear(c)
    for k in T.Pipelined(steps, num_stages=4):
        T.copy(W[layer, row * ROWS, (part * steps + k) * DEPTH], w)
        T.gemm(w, x[begin + k, :, :], c, transpose_B=True)
    for i, j in T.Parallel(ROWS, sizes.rows):
        if j < sizes.batch:
            C[part, j, row * ROWS + i] = c[i, j]


@T.macro
def scaled(x: Any, weight: Any, H: Any, squares: Any, layer: Any, row: Any, column: Any) -> None:
    """A tile of H = x * weight, and its part of the sum of squares: the norm's factor is applied behind the product."""
    square = T.alloc((1, COLUMNS), "float32", level="l0")
    total = T.alloc((1,), "float32", level="l0")
    for i, j in T.Parallel(1, COLUMNS):
        square[i, j] = x[i, j] * x[i, j]
        H[row + i, column * COLUMNS + j] = x[i, j] * weight[layer, column * COLUMNS + j]
    T.reduce_sum(square, total, dim=1)
    for i in T.Parallel(1):
        squares[column, row + i] = total[i]


@T.macro
def factor(squares: Any, scale: Any, row: Any, features: int) -> None:
    """The factor of a row's norm."""
    scale[0] = 0
    for column in T.unroll(features // COLUMNS):
        scale[0] += squares[column, row]
    scale[0] = T.rsqrt(scale[0] / features + 1e-5)


@T.macro
def prepare(X: Any, weight: Any, H: Any, squares: Any, row: Any, column: Any) -> None:
    """`scaled` of a tile of the residual stream."""
    x = T.alloc((1, COLUMNS), "float32", level="l0")
    T.copy(X[row, column * COLUMNS], x)
    scaled(x, weight, H, squares, 0, row, column)


@T.macro
def add_parts(C: Any, X: Any, total: Any, sizes: Sizes, row: Any, column: Any, parts: int) -> None:
    """A tile of X + the sum of C's parts of all devices."""
    tile = T.alloc((1, COLUMNS), "float32", level="l1")
    for i, j in T.Parallel(1, COLUMNS):
        total[i, j] = X[row + i, column * COLUMNS + j] / sizes.devices
    for part in T.unroll(parts):
        for i, j in T.Parallel(1, COLUMNS):
            total[i, j] += C[part, row + i, column * COLUMNS + j]
    T.copy(total, tile)
    with T.Scale("device"):
        T.allreduce(tile)
    T.copy(tile, total)


@T.macro
def attend(
    QKV: Any, squares: Any, angles: Any, at: Any, K: Any, V: Any, S: Any, L: Any, sizes: Sizes,
    layer: Any, span: Any, group: Any, row: Any,
) -> None:  # fmt: skip
    """A group's attention over some of its keys: not normalized, with the maximum and the sum of each head.

    The task rotates the group's queries, and the new key and value, which it caches if they are among its own.
    """
    s, half, each = sizes, sizes.width // 2, sizes.heads // sizes.groups
    q = T.alloc((QUERIES, s.width), "bfloat16", level="l1")
    k = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    v = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    given = T.alloc((each + 2, s.width), "float32", level="l1")
    found = T.alloc((each, s.width), "float32", level="l1")
    fresh = T.alloc((each + 2, s.width), "float32", level="l0")
    scale = T.alloc((1,), "float32", level="l0")
    score = T.alloc((QUERIES, SPAN), "float32", level="l0")
    weight = T.alloc((QUERIES, SPAN), "bfloat16", level="l0")
    o = T.alloc((QUERIES, s.width), "float32", level="l0")
    most = T.alloc((QUERIES,), "float32", level="l0")
    total = T.alloc((QUERIES,), "float32", level="l0")
    T.copy(K[layer, row, group, span * SPAN : (span + 1) * SPAN, :], k)
    T.copy(V[layer, row, group, span * SPAN : (span + 1) * SPAN, :], v)
    factor(squares, scale, row, s.hidden)
    T.clear(fresh)
    for part in T.unroll(s.splits[0]):
        for i, j in T.Parallel(each + 2, s.width):
            head = T.if_then_else(i < each, group * each + i, s.heads + (i - each) * s.groups + group)
            fresh[i, j] += QKV[part, row, head * s.width + j]
    for i, j in T.Parallel(each + 2, s.width):
        given[i, j] = fresh[i, j] * scale[0]
    for i, j in T.Parallel(QUERIES, half):
        head = T.min(i, each - 1)
        q[i, j] = T.if_then_else(
            i < each, given[head, j] * angles[0, row, j] - given[head, half + j] * angles[1, row, j], 0
        )
        q[i, half + j] = T.if_then_else(
            i < each, given[head, half + j] * angles[0, row, j] + given[head, j] * angles[1, row, j], 0
        )
    place = at[row] - span * SPAN
    for j in T.Parallel(half):
        if T.And(0 <= place, place < SPAN):
            k[place, j] = given[each, j] * angles[0, row, j] - given[each, half + j] * angles[1, row, j]
            k[place, half + j] = given[each, half + j] * angles[0, row, j] + given[each, j] * angles[1, row, j]
    for j in T.Parallel(s.width):
        if T.And(0 <= place, place < SPAN):
            v[place, j] = given[each + 1, j]
            V[layer, row, group, span * SPAN + place, j] = given[each + 1, j]
            K[layer, row, group, span * SPAN + place, j] = k[place, j]
    T.clear(score)
    T.gemm(q, k, score, transpose_B=True)
    for i, j in T.Parallel(QUERIES, SPAN):
        score[i, j] = T.if_then_else(
            span * SPAN + j <= at[row], score[i, j] * (1.4426950408889634 / s.width**0.5), -1e30
        )
    T.reduce_max(score, most, dim=1)
    for i, j in T.Parallel(QUERIES, SPAN):
        score[i, j] = T.exp2(score[i, j] - most[i])
    T.reduce_sum(score, total, dim=1)
    T.copy(score, weight)
    T.clear(o)
    T.gemm(weight, v, o)
    for i, j in T.Parallel(QUERIES, s.width):
        if i < each:
            found[i, j] = o[i, j]
    for i in T.Parallel(QUERIES):
        if i < each:
            given[i, 0] = most[i]
            given[i, 1] = total[i]
    for i, j in T.Parallel(each, s.width):
        S[span, row, group * each + i, j] = found[i, j]
    for i, j in T.Parallel(each, 2):
        L[span, row, group * each + i, j] = given[i, j]


@T.macro
def combined(S: Any, L: Any, o: Any, sizes: Sizes, first: Any, heads: int, row: Any) -> None:
    """Some heads' attention over all keys, (heads, width)."""
    s, spans = sizes, sizes.keys // SPAN
    most = T.alloc((heads,), "float32", level="l0")
    total = T.alloc((heads,), "float32", level="l0")
    T.fill(most, -1e30)
    T.clear(total)
    T.clear(o)
    for span in T.unroll(spans):
        for i in T.Parallel(heads):
            most[i] = T.max(most[i], L[span, row, first + i, 0])
    for span in T.unroll(spans):
        for i in T.Parallel(heads):
            total[i] += T.exp2(L[span, row, first + i, 0] - most[i]) * L[span, row, first + i, 1]
        for i, j in T.Parallel(heads, s.width):
            o[i, j] += T.exp2(L[span, row, first + i, 0] - most[i]) * S[span, row, first + i, j]
    for i, j in T.Parallel(heads, s.width):
        o[i, j] = o[i, j] / total[i]


@T.macro
def combine(S: Any, L: Any, A: Any, sizes: Sizes, head: Any, row: Any) -> None:
    """A head's attention over all keys."""
    o = T.alloc((1, sizes.width), "float32", level="l0")
    combined(S, L, o, sizes, head, 1, row)
    for i, j in T.Parallel(1, sizes.width):
        A[row, (head + i) * sizes.width + j] = o[i, j]


@T.macro
def project(W: Any, S: Any, L: Any, C: Any, sizes: Sizes, layer: Any, row: Any, part: Any, splits: int) -> None:
    """`multiply` of the attention of one sequence over all keys, which each task combines for its part of K."""
    heads = sizes.heads // splits
    x = T.alloc((heads, sizes.rows, DEPTH), "bfloat16", level="l1")
    o = T.alloc((heads, DEPTH), "float32", level="l0")
    combined(S, L, o, sizes, part * heads, heads, 0)
    for k, i, j in T.Parallel(heads, sizes.rows, DEPTH):
        x[k, i, j] = 0
    for k, j in T.Parallel(heads, DEPTH):
        x[k, 0, j] = o[k, j]
    accumulate(W, x, C, sizes, layer, row, part, heads, 0)


@T.macro
def gate(G: Any, squares: Any, M: Any, sizes: Sizes, row: Any, column: Any) -> None:
    """A tile of M = silu(first half) * second half of the sum of G's parts."""
    a = T.alloc((1, COLUMNS), "float32", level="l0")
    b = T.alloc((1, COLUMNS), "float32", level="l0")
    scale = T.alloc((1,), "float32", level="l0")
    T.clear(a)
    T.clear(b)
    factor(squares, scale, row, sizes.hidden)
    for part in T.unroll(sizes.splits[2]):
        for i, j in T.Parallel(1, COLUMNS):
            a[i, j] += G[part, row + i, column * COLUMNS + j]
            b[i, j] += G[part, row + i, sizes.inner + column * COLUMNS + j]
    for i, j in T.Parallel(1, COLUMNS):
        a[i, j] *= scale[0]
        M[row + i, column * COLUMNS + j] = a[i, j] / (1 + T.exp(-a[i, j])) * b[i, j] * scale[0]


def decode_layer(sizes: Sizes) -> Any:
    """The program. X is the residual stream before and after; the last nine tensors are workspaces."""
    s, n = sizes, sizes.rows
    values, spans = s.heads * s.width, s.keys // SPAN
    first, out, up, down = s.splits

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
        S: T.Tensor((spans, n, s.heads, s.width), "float32"),
        L: T.Tensor((spans, n, s.heads, 2), "float32"),
        A: T.Tensor((n, values), "bfloat16"),
        C: T.Tensor((out, n, s.hidden), "float32"),
        P: T.Tensor((n, s.hidden), "float32"),
        G: T.Tensor((up, n, 2 * s.inner), "float32"),
        M: T.Tensor((n, s.inner), "bfloat16"),
        D: T.Tensor((down, n, s.hidden), "float32"),
    ):
        with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch), threads=THREADS) as (column, row):
            prepare(X, norm1, H, R, row, column)
        for layer in T.serial(s.layers):
            with T.Kernel(device=s.devices, block=(s.projected // ROWS, first), threads=THREADS) as (row, part):
                multiply(Wqkv, H, QKV, s, layer, row, part, first)
            with T.Kernel(device=s.devices, block=(spans, s.groups, s.batch), threads=THREADS) as (span, group, row):
                attend(QKV, R, angles, at, K, V, S, L, s, layer, span, group, row)
            if s.batch > 1:
                with T.Kernel(device=s.devices, block=(s.heads, s.batch), threads=THREADS) as (head, row):
                    combine(S, L, A, s, head, row)
            with T.Kernel(device=s.devices, block=(s.hidden // ROWS, out), threads=THREADS) as (row, part):
                if s.batch > 1:
                    multiply(Wo, A, C, s, layer, row, part, out)
                else:
                    project(Wo, S, L, C, s, layer, row, part, out)
            with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch), threads=THREADS) as (column, row):
                with T.Scale("block"):
                    total = T.alloc((1, COLUMNS), "float32", level="l0")
                    add_parts(C, X, total, s, row, column, out)
                    T.copy(total, P[row, column * COLUMNS])
                    scaled(total, norm2, H, R, layer, row, column)
            with T.Kernel(device=s.devices, block=(2 * s.inner // ROWS, up), threads=THREADS) as (row, part):
                multiply(Wup, H, G, s, layer, row, part, up)
            with T.Kernel(device=s.devices, block=(s.inner // COLUMNS, s.batch), threads=THREADS) as (column, row):
                gate(G, R, M, s, row, column)
            with T.Kernel(device=s.devices, block=(s.hidden // ROWS, down), threads=THREADS) as (row, part):
                multiply(Wdown, M, D, s, layer, row, part, down)
            with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch), threads=THREADS) as (column, row):
                with T.Scale("block"):
                    result = T.alloc((1, COLUMNS), "float32", level="l0")
                    add_parts(D, P, result, s, row, column, down)
                    T.copy(result, X[row, column * COLUMNS])
                    scaled(result, norm1, H, R, (layer + 1) % s.layers, row, column)

    return decode_layer
