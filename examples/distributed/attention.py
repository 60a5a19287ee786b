# SPDX-License-Identifier: MIT
"""Common parts of the attention examples: steps of online softmax, and the float64 reference with its error bound."""

import math

import common
import torch

import tilescale.language as T

PAD = 8
"""Layout of tiles that all threads write by columns: consecutive rows begin in different banks of shared memory."""


def scale(dim: int) -> float:
    """Factor of scores of vectors of `dim` elements, times log2(e): the hardware has powers of 2."""
    return math.log2(math.e) / math.sqrt(dim)


@T.macro
def sums(scores, total, shrink):
    """Sum of all weights so far, and sum of those of a tile of keys."""
    added = T.alloc(total.shape, "float32", level="l0")
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(total.shape[0]):
        total[i] = total[i] * shrink[i] + added[i]


@T.macro
def sums_apart(scores, total, shrink):
    """Add up the weights of each warpgroup's keys; the sums are combined after the last tile."""
    with T.Scale("warpgroup"):
        own, added = T.view(total, layout=T.Replica), T.alloc(total.shape, "float32", level="l0")
        T.reduce_sum(T.view(scores, layout=T.FullCol), added, dim=1)
        for i in T.Parallel(total.shape[0]):
            own[i] = own[i] * shrink[i] + added[i]


@T.macro
def softmax_step(scores, top, total, acc, scale, add=sums):
    """Online softmax (Milakov and Gimelshein, 2018): the scores of a tile of keys become weights.

    Args:
        scores: (queries, keys); afterwards 2 ** ((score - top) * scale), the weights of the values.
        top, total: (queries,), the maximum of all scores so far, and the sum of all weights relative to it.
        acc: (queries, columns), the weighted sum of values so far; rescaled when the maximum has grown.
        add: adds the weights to `total`.
        scale: factor of the scores, as of `scale()`.
    """
    rows, columns = scores.shape
    before = T.alloc((rows,), "float32", level="l0")
    shrink = T.alloc((rows,), "float32", level="l0")
    T.copy(top, before)
    T.reduce_max(scores, top, dim=1, clear=False)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2((before[i] - top[i]) * scale)
    for i, j in T.Parallel(rows, columns):
        scores[i, j] = T.exp2((scores[i, j] - top[i]) * scale)
    add(scores, total, shrink)
    for i, j in T.Parallel(rows, acc.shape[1]):
        acc[i, j] = acc[i, j] * shrink[i]


@T.macro
def begin(top, total, acc):
    """Initialize the state: no keys so far."""
    T.clear(acc)
    T.clear(total)
    T.fill(top, -1e30)


@T.macro
def finish_apart(acc, top, total, scale):
    """Divide by the sums of weights, adding those of the warpgroups; leave their log2 in `total`."""
    with T.Scale("warpgroup"):
        T.allreduce(T.view(total, layout=T.Replica))
    for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
        acc[i, j] = acc[i, j] * (1.0 / total[i])
    for i in T.Parallel(total.shape[0]):
        total[i] = T.log2(total[i]) + top[i] * scale


@T.macro
def merge_splits(acc, total, whole, log, splits, merge):
    """Combine, by `merge`, the partial results of the blocks of a cluster: each block gets some rows.

    Args:
        acc, total: (heads, columns) and (heads,), this block's results.
        whole, log: the same of all blocks, of this one's share of the heads; parts travel in the type of `whole`.
    """
    rows, columns = whole.shape
    held, received = (T.alloc((acc.shape[0], columns + PAD), whole.dtype, level="l1") for _ in range(2))
    logs, its = (T.alloc(total.shape, "float32", level="l1") for _ in range(2))
    mean = T.alloc((rows, columns), "float32", level="l0")
    T.copy(acc, held[:, 0:columns])
    T.copy(total, logs)
    with T.Scale("block"):
        T.all_to_all(held[:, 0:columns], received[:, 0:columns])
        T.all_to_all(logs, its)
    T.copy(received[0:rows, 0:columns], mean)
    T.copy(its[0:rows], log)
    for part in T.serial(1, splits):
        for i, j in T.Parallel(rows, columns):
            other = received[part * rows + i, j], its[part * rows + i]
            mean[i, j] = merge((mean[i, j], log[i]), other)[0]
        for i in T.Parallel(rows):
            log[i] = merge((0.0, log[i]), (0.0, its[part * rows + i]))[1]
    T.copy(mean, whole)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of float16 queries (..., queries, dim) to all keys and values (..., keys, dim), and an error
    bound.

    The programs round weights to float16: each may be off by 2**-11 of itself. A score, a float32 sum, that is off by e
    changes its weight and the sum of all weights by a factor of exp(e), about 1 + e each.
    """
    q, k, v = q.double() * q.shape[-1] ** -0.5, k.double(), v.double()
    weights = (q @ k.mT).softmax(-1)
    score_error = common.rounding(q.shape[-1], q.abs() @ k.abs().mT).amax(-1, keepdim=True)
    return weights @ v, (2.0**-10 + 2 * score_error) * (weights @ v.abs())
