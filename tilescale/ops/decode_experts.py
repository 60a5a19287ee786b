# SPDX-License-Identifier: MIT
"""Experts of a decode step as phases: the router within the norm before it, then two phases of GEMMs.

All sequences that take an expert share one pass over its weights: a tile of weights is the right operand of a GEMM
with all rows of activations, of which tensor cores take 16 at once anyway. Chosen experts have slots, in the order of
their numbers, and a task takes some outputs of a slot. So the expert of a task follows from memory, and its weights are
loaded when all logits are there. Each block chooses by itself from the logits: it takes less time than one more phase.
"""

import math
from typing import Any

import torch

import tilescale.language as T
from tilescale.ops.decode_attention import factor
from tilescale.ops.decode_sizes import COLUMNS, DEPTH, ROWS, THREADS, TOKENS, LayerSizes

STAGES, GATE_STAGES, GATE_BYTES = 4, 6, 64 << 10
"""Pipeline stages of tiles of weights; the fewest stages of gate and up; bytes of tiles of gate and up, if more fit."""

NARROW = 64
"""Elements of K in a step of gate and up: with those of 128 bytes the two are contiguous parts of a swizzled tile."""

AT_ONCE = 16
"""Experts that a loop over all of them takes at once: their loads from shared memory do not wait for one another."""

LOW = -1e30
"""Logit of an expert that does not exist."""


@T.macro
def score(x: Any, router: Any, logits: Any, sizes: LayerSizes, row: Any, column: Any) -> None:
    """The part of a tile of features, times the norm's weight alone, in the logits of some rows."""
    s, rows = sizes, int(x.shape[0])
    h = T.alloc((s.rows, COLUMNS), "bfloat16", level="l1")
    c = T.alloc((s.scores, s.rows), "float32", level="l0")
    for i, j in T.Parallel(s.rows, COLUMNS):
        h[i, j] = 0
    for i, j in T.Parallel(rows, COLUMNS):
        h[i, j] = x[i, j]
    T.clear(c)
    T.gemm(router, h, c, transpose_B=True)
    for e, i in T.Parallel(s.scores, s.rows):
        if i < rows:
            logits[column, row + i, e] = c[e, i]


@T.macro
def choose(logits: Any, factors: Any, share: Any, sizes: LayerSizes) -> None:
    """The weight of each expert in each row: 0 unless it is among the best, of equal ones those of lower numbers."""
    s, n = sizes, sizes.batch
    shape = 1 << (n - 1).bit_length(), s.scores  # the last row again, until threads can share them evenly
    known = T.alloc(shape, "float32", level="l1")
    mine = T.alloc(shape, "float32", level="l0")
    better = T.alloc(shape, "int32", level="l0")
    most, total = (T.alloc(shape[:1], "float32", level="l0") for _ in range(2))
    T.clear(mine)
    for column in T.unroll(s.hidden // COLUMNS):
        for i, e in T.Parallel(*shape):
            mine[i, e] += logits[column, T.min(i, n - 1), e]
    for i, e in T.Parallel(*shape):
        mine[i, e] = T.if_then_else(e < s.experts, mine[i, e] * factors[T.min(i, n - 1)], LOW)
    T.copy(mine, known)
    T.reduce_max(mine, most, dim=1)
    T.clear(better)
    for first in T.serial(s.scores // AT_ONCE):
        for each in T.unroll(AT_ONCE):
            for i, e in T.Parallel(*shape):
                other = first * AT_ONCE + each
                is_higher = T.if_then_else(known[i, other] > mine[i, e], 1, 0)
                is_as_high = T.if_then_else(known[i, other] >= mine[i, e], 1, 0)
                better[i, e] += T.if_then_else(other < e, is_as_high, is_higher)
    for i, e in T.Parallel(*shape):
        counts = (better[i, e] < s.choices) if s.normalizes else (e < s.experts)
        mine[i, e] = T.if_then_else(counts, T.exp(mine[i, e] - most[i]), 0)
    T.reduce_sum(mine, total, dim=1)
    for i, e in T.Parallel(*shape):
        if i < n:
            share[i, e] = T.if_then_else(better[i, e] < s.choices, mine[i, e] / total[i], 0)


@T.macro
def number(share: Any, table: Any, sizes: LayerSizes) -> None:
    """The expert of each slot, and behind them the number of chosen experts."""
    s, wide = sizes, -(-(sizes.slots + 1) // THREADS) * THREADS
    taken = T.alloc((s.scores,), "int32", level="l1")
    expert, seen = (T.alloc((wide,), "int32", level="l0") for _ in range(2))
    for e in T.Parallel(s.scores):
        taken[e] = 0
        for i in T.unroll(s.batch):
            taken[e] = T.max(taken[e], T.if_then_else(share[i, e] > 0, 1, 0))
    T.clear(expert)
    T.clear(seen)
    for first in T.serial(s.scores // AT_ONCE):
        for each in T.unroll(AT_ONCE):
            for z in T.Parallel(wide):
                e = first * AT_ONCE + each
                expert[z] += T.if_then_else(seen[z] == z, taken[e] * e, 0)
                seen[z] += taken[e]
    for z in T.Parallel(wide):
        if z <= s.slots:
            table[z] = T.if_then_else(z < s.slots, expert[z], seen[z])


@T.macro
def gate_up(
    W: Any, H: Any, logits: Any, squares: Any, M: Any, picked: Any, sizes: LayerSizes,
    layer: Any, column: Any, slot: Any,
) -> None:  # fmt: skip
    """A tile of M[slot] = silu(gate H) * up H of the slot's expert, times its weight in each row; rows without: 0."""
    s, high = sizes, sizes.gated
    stages = max(GATE_BYTES // (2 * high * NARROW * s.nbytes), GATE_STAGES)
    factors = T.alloc((s.batch,), "float32", level="l1")
    found = T.alloc((s.batch,), "float32", level="l0")
    share = T.alloc((s.batch, s.scores), "float32", level="l1")
    table = T.alloc((s.slots + 1,), "int32", level="l1")
    x = T.alloc((TOKENS, NARROW), "bfloat16", level="l1")
    w = T.alloc((2 * high, NARROW), "bfloat16", level="l1")
    c = T.alloc((TOKENS, 2 * high), "float32", level="l0")
    made = T.alloc((TOKENS, 2 * high), "float32", level="l1")
    expert = T.alloc_var("int32")
    factor(squares, found, s, lambda i: i)
    T.copy(found, factors)
    choose(logits, factors, share, s)
    number(share, table, s)
    if column + slot == 0:
        T.copy(table, picked)
    if slot < table[s.slots]:
        expert = table[slot]
        T.clear(c)
        for k in T.Pipelined(s.hidden // NARROW, num_stages=stages):
            T.copy(H[0:TOKENS, k * NARROW : (k + 1) * NARROW], x)
            T.copy(W[layer, expert, column * high, k * NARROW], w[0:high, :])
            T.copy(W[layer, expert, s.inner + column * high, k * NARROW], w[high : 2 * high, :])
            T.gemm(x, w, c, transpose_B=True)
        T.copy(c, made)
        for i, j in T.Parallel(TOKENS, high):
            row = T.min(i, s.batch - 1)
            gate = made[row, j] * factors[row]
            value = gate / (1 + T.exp(-gate)) * made[row, high + j] * factors[row] * share[row, expert]
            M[slot, i, column * high + j] = T.if_then_else(i < s.batch, value, 0)


@T.macro
def down(
    W: Any, M: Any, picked: Any, D: Any, sizes: LayerSizes, layer: Any, column: Any, part: Any, exchanged: bool
) -> None:  # fmt: skip
    """A tile of D[part]: the sum over each `down_parts`-th slot of M[slot] W^T of its expert, and over the devices."""
    s, depth, parts = sizes, math.gcd(sizes.inner, DEPTH), int(D.shape[0])
    x = T.alloc((TOKENS, depth), "bfloat16", level="l1")
    w = T.alloc((ROWS, depth), "bfloat16", level="l1")
    c = T.alloc((TOKENS, ROWS), "float32", level="l0")
    expert = T.alloc_var("int32")
    T.clear(c)
    for iteration in T.serial(T.ceildiv(T.max(picked[s.slots] - part, 0), parts)):
        expert = picked[part + iteration * parts]
        for k in T.Pipelined(s.inner // depth, num_stages=STAGES):
            T.copy(M[part + iteration * parts, 0:TOKENS, k * depth : (k + 1) * depth], x)
            T.copy(W[layer, expert, column * ROWS, k * depth], w)
            T.gemm(x, w, c, transpose_B=True)
    if exchanged:
        made = T.alloc((TOKENS, ROWS), "float32", level="l1")
        T.copy(c, made)
        with T.Scale("device"):
            T.allreduce(made[0 : s.batch, :])
        T.copy(made, c)
    for i, j in T.Parallel(TOKENS, ROWS):
        if i < s.batch:
            D[part, i, column * ROWS + j] = c[i, j]


def all_chosen(sizes: LayerSizes) -> dict[str, torch.Tensor]:
    """Values of the program's tables of experts with every slot taken, to simulate it without data."""
    if not sizes.experts:
        return {}
    table = torch.tensor([*range(sizes.slots), sizes.slots], dtype=torch.int32)
    return {"table": table, "picked": table}
