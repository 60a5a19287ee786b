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

    @property
    def rows(self) -> int:
        """Rows of activations: what tensor cores take at once."""
        return 8 if self.batch <= 8 else 16

    @property
    def projected(self) -> int:
        """Features of queries, keys and values."""
        return (self.heads + 2 * self.groups) * self.width


@T.macro
def multiply(W: Any, X: Any, C: Any, sizes: Sizes, row: Any, part: Any, splits: int) -> None:
    """C[part, :, row * ROWS ...] = X W^T over a part of K; the block keeps all of X for its next tasks where it can."""
    steps, wide = int(X.shape[1]) // DEPTH // splits, 2 * sizes.rows * int(X.shape[1]) <= SLAB
    kept, first = (splits * steps, 0) if wide else (steps, part * steps)
    begin = part * steps - first
    x = T.alloc((kept, sizes.rows, DEPTH), "bfloat16", level="l1")
    w = T.alloc((ROWS, DEPTH), "bfloat16", level="l1")
    c = T.alloc((ROWS, sizes.rows), "float32", level="l0")
    for k, i, j in T.Parallel(kept, sizes.rows, DEPTH):
        x[k, i, j] = X[i, (first + k) * DEPTH + j]
    T.clear(c)
    for k in T.Pipelined(steps, num_stages=4):
        T.copy(W[row * ROWS, (part * steps + k) * DEPTH], w)
        T.gemm(w, x[begin + k, :, :], c, transpose_B=True)
    for i, j in T.Parallel(ROWS, sizes.rows):
        if j < sizes.batch:
            C[part, j, row * ROWS + i] = c[i, j]


@T.macro
def normalize(X: Any, weight: Any, H: Any, row: Any, features: int) -> None:
    """A row of H = RMSNorm(X)."""
    x = T.alloc((1, features), "float32", level="l0")
    squares = T.alloc((1, features), "float32", level="l0")
    total = T.alloc((1,), "float32", level="l0")
    T.copy(X[row, 0], x)
    for i, j in T.Parallel(1, features):
        squares[i, j] = x[i, j] * x[i, j]
    T.reduce_sum(squares, total, dim=1)
    for i, j in T.Parallel(1, features):
        H[row + i, j] = x[i, j] * T.rsqrt(total[i] / features + 1e-5) * weight[j]


@T.macro
def add_parts(C: Any, X: Any, Y: Any, sizes: Sizes, row: Any, column: Any, parts: int) -> None:
    """A tile of Y = X + the sum of C's parts of all devices."""
    total = T.alloc((1, COLUMNS), "float32", level="l0")
    tile = T.alloc((1, COLUMNS), "float32", level="l1")
    for i, j in T.Parallel(1, COLUMNS):
        total[i, j] = X[row + i, column * COLUMNS + j] / sizes.devices
    for part in T.unroll(parts):
        for i, j in T.Parallel(1, COLUMNS):
            total[i, j] += C[part, row + i, column * COLUMNS + j]
    T.copy(total, tile)
    with T.Scale("device"):
        T.allreduce(tile)
    T.copy(tile, Y[row, column * COLUMNS])


@T.macro
def rotate(QKV: Any, angles: Any, at: Any, Q: Any, K: Any, V: Any, sizes: Sizes, group: Any, row: Any) -> None:
    """Queries of a group, and its new key and value, rotated."""
    s, half, each = sizes, sizes.width // 2, sizes.heads // sizes.groups
    total = T.alloc((each + 2, s.width), "float32", level="l0")
    given = T.alloc((each + 2, s.width), "float32", level="l1")
    T.clear(total)
    for part in T.unroll(s.splits[0]):
        for i, j in T.Parallel(each + 2, s.width):
            head = T.if_then_else(i < each, group * each + i, s.heads + (i - each) * s.groups + group)
            total[i, j] += QKV[part, row, head * s.width + j]
    T.copy(total, given)
    for i, j in T.Parallel(each, half):
        Q[row, group * each + i, j] = given[i, j] * angles[0, row, j] - given[i, half + j] * angles[1, row, j]
        Q[row, group * each + i, half + j] = given[i, half + j] * angles[0, row, j] + given[i, j] * angles[1, row, j]
    for j in T.Parallel(half):
        K[row, group, at[row], j] = given[each, j] * angles[0, row, j] - given[each, half + j] * angles[1, row, j]
        K[row, group, at[row], half + j] = (
            given[each, half + j] * angles[0, row, j] + given[each, j] * angles[1, row, j]
        )
    for j in T.Parallel(s.width):
        V[row, group, at[row], j] = given[each + 1, j]


@T.macro
def attend(Q: Any, K: Any, V: Any, at: Any, S: Any, L: Any, sizes: Sizes, span: Any, group: Any, row: Any) -> None:
    """A group's attention over some of its keys: not normalized, with the maximum and the sum of each head."""
    s, each = sizes, sizes.heads // sizes.groups
    q = T.alloc((QUERIES, s.width), "bfloat16", level="l1")
    k = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    v = T.alloc((SPAN, s.width), "bfloat16", level="l1")
    score = T.alloc((QUERIES, SPAN), "float32", level="l0")
    weight = T.alloc((QUERIES, SPAN), "bfloat16", level="l0")
    o = T.alloc((QUERIES, s.width), "float32", level="l0")
    most = T.alloc((QUERIES,), "float32", level="l0")
    total = T.alloc((QUERIES,), "float32", level="l0")
    for i, j in T.Parallel(QUERIES, s.width):
        q[i, j] = T.if_then_else(i < each, Q[row, group * each + T.min(i, each - 1), j], 0)
    T.copy(K[row, group, span * SPAN : (span + 1) * SPAN, :], k)
    T.copy(V[row, group, span * SPAN : (span + 1) * SPAN, :], v)
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
            S[span, row, group * each + i, j] = o[i, j]
    for i in T.Parallel(QUERIES):
        if i < each:
            L[span, row, group * each + i, 0] = most[i]
            L[span, row, group * each + i, 1] = total[i]


@T.macro
def combine(S: Any, L: Any, A: Any, sizes: Sizes, head: Any, row: Any) -> None:
    """A head's attention over all keys."""
    s, spans = sizes, sizes.keys // SPAN
    o = T.alloc((1, s.width), "float32", level="l0")
    most = T.alloc((1,), "float32", level="l0")
    total = T.alloc((1,), "float32", level="l0")
    most[0] = -1e30
    total[0] = 0
    T.clear(o)
    for span in T.unroll(spans):
        most[0] = T.max(most[0], L[span, row, head, 0])
    for span in T.unroll(spans):
        total[0] += T.exp2(L[span, row, head, 0] - most[0]) * L[span, row, head, 1]
        for i, j in T.Parallel(1, s.width):
            o[i, j] += T.exp2(L[span, row, head, 0] - most[0]) * S[span, row, head, j]
    for i, j in T.Parallel(1, s.width):
        A[row + i, head * s.width + j] = o[i, j] / total[0]


@T.macro
def gate(G: Any, M: Any, sizes: Sizes, row: Any, column: Any) -> None:
    """A tile of M = silu(first half) * second half of the sum of G's parts."""
    a = T.alloc((1, COLUMNS), "float32", level="l0")
    b = T.alloc((1, COLUMNS), "float32", level="l0")
    T.clear(a)
    T.clear(b)
    for part in T.unroll(sizes.splits[2]):
        for i, j in T.Parallel(1, COLUMNS):
            a[i, j] += G[part, row + i, column * COLUMNS + j]
            b[i, j] += G[part, row + i, sizes.inner + column * COLUMNS + j]
    for i, j in T.Parallel(1, COLUMNS):
        M[row + i, column * COLUMNS + j] = a[i, j] / (1 + T.exp(-a[i, j])) * b[i, j]


def decode_layer(sizes: Sizes) -> Any:
    """The program. X is the residual stream before and after; the last nine tensors are workspaces."""
    s, n = sizes, sizes.rows
    values, spans = s.heads * s.width, s.keys // SPAN
    first, out, up, down = s.splits

    @T.prim_func
    def decode_layer(
        X: T.Tensor((n, s.hidden), "float32"),
        norm1: T.Tensor((s.hidden,), "float32"),
        norm2: T.Tensor((s.hidden,), "float32"),
        Wqkv: T.Tensor((s.projected, s.hidden), "bfloat16"),
        Wo: T.Tensor((s.hidden, values), "bfloat16"),
        Wup: T.Tensor((2 * s.inner, s.hidden), "bfloat16"),
        Wdown: T.Tensor((s.hidden, s.inner), "bfloat16"),
        angles: T.Tensor((2, n, s.width // 2), "float32"),
        at: T.Tensor((n,), "int32"),
        K: T.Tensor((n, s.groups, s.keys, s.width), "bfloat16"),
        V: T.Tensor((n, s.groups, s.keys, s.width), "bfloat16"),
        H: T.Tensor((n, s.hidden), "bfloat16"),
        QKV: T.Tensor((first, n, s.projected), "float32"),
        Q: T.Tensor((n, s.heads, s.width), "bfloat16"),
        S: T.Tensor((spans, n, s.heads, s.width), "float32"),
        L: T.Tensor((spans, n, s.heads, 2), "float32"),
        A: T.Tensor((n, values), "bfloat16"),
        C: T.Tensor((out, n, s.hidden), "float32"),
        P: T.Tensor((n, s.hidden), "float32"),
        G: T.Tensor((up, n, 2 * s.inner), "float32"),
        M: T.Tensor((n, s.inner), "bfloat16"),
        D: T.Tensor((down, n, s.hidden), "float32"),
    ):
        with T.Kernel(device=s.devices, block=s.batch, threads=THREADS) as row:
            normalize(X, norm1, H, row, s.hidden)
        with T.Kernel(device=s.devices, block=(s.projected // ROWS, first), threads=THREADS) as (row, part):
            multiply(Wqkv, H, QKV, s, row, part, first)
        with T.Kernel(device=s.devices, block=(s.groups, s.batch), threads=THREADS) as (group, row):
            rotate(QKV, angles, at, Q, K, V, s, group, row)
        with T.Kernel(device=s.devices, block=(spans, s.groups, s.batch), threads=THREADS) as (span, group, row):
            attend(Q, K, V, at, S, L, s, span, group, row)
        with T.Kernel(device=s.devices, block=(s.heads, s.batch), threads=THREADS) as (head, row):
            combine(S, L, A, s, head, row)
        with T.Kernel(device=s.devices, block=(s.hidden // ROWS, out), threads=THREADS) as (row, part):
            multiply(Wo, A, C, s, row, part, out)
        with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch), threads=THREADS) as (column, row):
            with T.Scale("block"):
                add_parts(C, X, P, s, row, column, out)
        with T.Kernel(device=s.devices, block=s.batch, threads=THREADS) as row:
            normalize(P, norm2, H, row, s.hidden)
        with T.Kernel(device=s.devices, block=(2 * s.inner // ROWS, up), threads=THREADS) as (row, part):
            multiply(Wup, H, G, s, row, part, up)
        with T.Kernel(device=s.devices, block=(s.inner // COLUMNS, s.batch), threads=THREADS) as (column, row):
            gate(G, M, s, row, column)
        with T.Kernel(device=s.devices, block=(s.hidden // ROWS, down), threads=THREADS) as (row, part):
            multiply(Wdown, M, D, s, row, part, down)
        with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch), threads=THREADS) as (column, row):
            with T.Scale("block"):
                add_parts(D, P, X, s, row, column, down)

    return decode_layer
