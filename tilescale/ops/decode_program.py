# SPDX-License-Identifier: MIT
"""A decode step of decoder layers as a program of grids, one after the other, with collectives of tiles.

The residual stream is float32. What is between two GEMMs is a phase, or part of the tasks of the second GEMM:
`LayerSizes.made` says which takes less time. A task of attention takes some keys of a group of heads.
"""

from functools import partial
from typing import Any

import tilescale.language as T
from tilescale.ops.decode_attention import attend, combine
from tilescale.ops.decode_experts import down, gate_up, score
from tilescale.ops.decode_gemms import gemm
from tilescale.ops.decode_inputs import add_and_scale, add_parts, begin_or_add, gate, keep, load_norm, put, scaled
from tilescale.ops.decode_sizes import COLUMNS, ROWS, THREADS, TOKENS, LayerSizes


@T.macro
def finish(D: Any, P: Any, X: Any, sizes: LayerSizes) -> None:
    """The phase behind layers whose first GEMM adds the parts of the MLP before: X = P + the sum of D's parts."""
    with T.Kernel(device=sizes.devices, block=sizes.hidden // COLUMNS, threads=THREADS) as column:
        total = T.alloc((sizes.batch, COLUMNS), "float32", level="l0")
        add_parts(D, P, total, sizes, lambda i: (i, column), True)
        put(total, X, lambda i: (i, column))


@T.macro
def prepare(X: Any, weight: Any, H: Any, of_H: Any, squares: Any, sizes: LayerSizes) -> None:
    """The phase in front of layers that each begin with a norm: the first one's."""
    s, high = sizes, sizes.each(sizes.hidden // COLUMNS)
    with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch // high), threads=THREADS) as (column, rows):
        x, w = (T.alloc((high, COLUMNS), "float32", level="l0") for _ in range(2))
        T.copy(X[rows * high, column * COLUMNS], x)
        load_norm(weight, 0, w, lambda i: (rows * high + i, column))
        scaled(x, w, squares, lambda i: (rows * high + i, column), True)
        keep(x, H, of_H, s, lambda i: (rows * high + i, column))


@T.macro
def between(
    C: Any, X: Any, P: Any, weight: Any, H: Any, of_H: Any, squares: Any, router: Any, logits: Any,
    sizes: LayerSizes, layer: Any, following: Any,
) -> None:  # fmt: skip
    """The phase between a GEMM and a norm's: P = X + the sum of C's parts, its norm, and what the router says of it.

    `logits` is None where no router follows, and `following` is the layer of the norm.
    """
    s, high = sizes, sizes.each(sizes.hidden // COLUMNS)
    with T.Kernel(device=s.devices, block=(s.hidden // COLUMNS, s.batch // high), threads=THREADS) as (column, rows):
        with T.Scale("block"):
            total, w = (T.alloc((high, COLUMNS), "float32", level="l0") for _ in range(2))
            load_norm(weight, following, w, lambda i: (rows * high + i, column))
            if logits is not None:
                scores = T.alloc((s.scores, COLUMNS), "bfloat16", level="l1")
                T.copy(router[layer, 0, column * COLUMNS], scores)
            add_parts(C, X, total, s, lambda i: (rows * high + i, column), False)
            put(total, P, lambda i: (rows * high + i, column))
            scaled(total, w, squares, lambda i: (rows * high + i, column), True)
            keep(total, H, of_H, s, lambda i: (rows * high + i, column))
            if logits is not None:
                score(total, scores, logits, s, rows * high, column)


@T.macro
def combine_early(S: Any, L: Any, A: Any, of_A: Any, sizes: LayerSizes) -> None:
    """The phase between attention and its projection: some heads' attention over all keys."""
    s, each = sizes, sizes.each(sizes.batch, sizes.heads)
    with T.Kernel(device=s.devices, block=(s.heads // each, s.batch), threads=THREADS) as (head, row):
        o = T.alloc((each, s.width), "float32", level="l0")
        combine(S, L, s, o, lambda i: (row, head * each + i), True)
        keep(o, A, of_A, s, lambda i: (row, head * each + i))


@T.macro
def gate_early(G: Any, squares: Any, M: Any, of_M: Any, sizes: LayerSizes) -> None:
    """The phase between the GEMMs of an MLP."""
    s, high = sizes, sizes.each(sizes.inner // COLUMNS)
    with T.Kernel(device=s.devices, block=(s.inner // COLUMNS, s.batch // high), threads=THREADS) as (column, rows):
        o = T.alloc((high, COLUMNS), "float32", level="l0")
        gate(G, squares, s, o, lambda i: (rows * high + i, column), True)
        keep(o, M, of_M, s, lambda i: (rows * high + i, column))


@T.macro
def experts_of_tokens(
    Wup: Any, Wdown: Any, H: Any, logits: Any, R: Any, M: Any, picked: Any, D: Any, sizes: LayerSizes, layer: Any,
    exchanged: bool,
) -> None:  # fmt: skip
    """The phases of the experts: D has the parts of their sum."""
    s, parts = sizes, int(D.shape[0])
    with T.Kernel(device=s.devices, block=(s.inner // s.gated, s.slots), threads=THREADS) as (column, slot):
        gate_up(Wup, H, logits, R, M, picked, s, layer, column, slot)
    with T.Kernel(device=s.devices, block=(s.hidden // ROWS, parts), threads=THREADS) as (column, part):
        with T.Scale("block"):
            down(Wdown, M, picked, D, s, layer, column, part, exchanged)


def decode_layers(sizes: LayerSizes) -> Any:
    """The program. X is the residual stream before and after, `lengths` counts cached tokens; from H on: workspaces."""
    s, n, t, values = sizes, sizes.batch, sizes.terms, sizes.heads * sizes.width
    parts, made = s.parts, s.made
    experts, several = ((s.experts,) if s.experts else ()), s.devices > 1

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
        R1: T.Tensor((s.hidden // COLUMNS, n), "float32"),
        R2: T.Tensor((s.hidden // COLUMNS, n), "float32"),
        QKV: T.Tensor((parts.into, n, s.projected), "float32"),
        S: T.Tensor((s.spans + 1, n, s.heads, s.width), "float32"),
        L: T.Tensor((s.spans + 1, n, s.heads, 2), "float32"),
        A: T.Tensor((t * n, values), s.weights),
        of_A: T.Tensor(s.factors(values), "float32"),
        C: T.Tensor((parts.out, n, s.hidden), "float32"),
        P: T.Tensor((n, s.hidden), "float32"),
        G: T.Tensor((parts.up, n, 2 * s.inner), "float32"),
        logits: T.Tensor((s.hidden // COLUMNS, n, s.scores) if s.experts else (1,), "float32"),
        picked: T.Tensor((s.slots + 1,), "int32"),
        M: T.Tensor((s.slots, TOKENS, s.inner) if s.experts else (t * n, s.inner), s.weights),
        of_M: T.Tensor(s.factors(s.inner), "float32"),
        D: T.Tensor((parts.down, n, s.hidden), "float32"),
    ):
        if not made.into:
            prepare(X, norm1, H, of_H, R1, s)
        for layer in T.serial(s.layers):
            make = partial(begin_or_add, D, P, X, norm1, R1, s, layer)
            gemm(Wqkv, of_Wqkv, H, of_H, QKV, s, layer, False, made.into, make)
            with T.Kernel(device=s.devices, block=(s.attends, s.groups, n), threads=THREADS) as (span, group, row):
                attend(QKV, R1, heads, angles, lengths, block_table, K, V, S, L, s, layer, span, group, row)
            if not made.out:
                combine_early(S, L, A, of_A, s)
            gemm(Wo, of_Wo, A, of_A, C, s, layer, several and made.up, made.out, partial(combine, S, L, s))
            if not made.up:
                between(C, X, P, norm2, H, of_H, R2, router, logits if s.experts else None, s, layer, layer)
            if s.experts:
                experts_of_tokens(Wup, Wdown, H, logits, R2, M, picked, D, s, layer, several and made.into)
            else:
                make = partial(add_and_scale, C, X, P, norm2, R2, s, layer)
                gemm(Wup, of_Wup, H, of_H, G, s, layer, False, made.up, make)
                if not made.down:
                    gate_early(G, R2, M, of_M, s)
                make = partial(gate, G, R2, s)
                gemm(Wdown, of_Wdown, M, of_M, D, s, layer, several and made.into, made.down, make)
            if not made.into:
                between(D, P, X, norm1, H, of_H, R1, router, None, s, layer, (layer + 1) % s.layers)
        if made.into:
            finish(D, P, X, s)

    return decode_layers
