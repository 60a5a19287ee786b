# SPDX-License-Identifier: MIT
"""Common parts of attention programs: online softmax, a tile of keys after the other, and the merging of partial
results.

Scores are kept as powers of 2, which the hardware has: `scale` holds the factor of log2(e).
"""

import math
from typing import Any

import tilescale.language as T
from tilescale.errors import ArgumentError
from tilescale.ops.arguments import check_number

NOTHING = -1e30
"""The score of a key that does not count, and the log-sum of no keys."""

LEAST_TOTAL = 1e-30
"""Negligible next to any sum of weights, and still a number to divide by."""


def base2(scale: float | None, dim: int) -> float:
    """Factor of scores before 2 ** score; None is the usual 1 / sqrt(dim).

    Raises ArgumentError for a scale that is not a positive number: the largest product is that of the largest score.
    """
    if scale is not None:
        check_number("scale", scale)
        if not 0 < scale < math.inf:
            raise ArgumentError(f"scale is {scale!r}", hint="give a positive number")
    return math.log2(math.e) * (dim**-0.5 if scale is None else scale)


@T.macro
def begin(top, total, acc):
    """Initialize the state without keys."""
    T.clear(acc)
    T.clear(total)
    T.fill(top, NOTHING)


@T.macro
def softmax_step(scores, top, total, acc, scale):
    """Online softmax (Milakov and Gimelshein, arXiv:1805.02867): the scores of a tile of keys become weights.

    `top` and `total` are the maximum of all previous scores and the sum of all weights relative to it; `acc`, the
    weighted sum of values, is scaled down where the maximum has grown. A key of the tile counts in each row.
    """
    rows, columns = scores.shape
    before, shrink, added = (T.alloc((rows,), "float32", level="l0") for _ in range(3))
    T.copy(top, before)
    T.reduce_max(scores, top, dim=1, clear=False)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2((before[i] - top[i]) * scale)
    for i, j in T.Parallel(rows, columns):
        scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * shrink[i] + added[i]
    for i, j in T.Parallel(rows, acc.shape[1]):
        acc[i, j] = acc[i, j] * shrink[i]


def mean(value: Any, total: Any) -> Any:
    """A weighted sum over the sum of the weights, which is 1 at least; 0 of no keys.

    Without a branch, and with a division that is the same for all values of a sum: the compiler makes it once.
    """
    return value * (1.0 / T.max(total, LEAST_TOTAL))


def log_sum(top: Any, total: Any, scale: float) -> Any:
    """log2 of the sum of the weights of all keys."""
    return T.if_then_else(total > 0, T.log2(total) + top * scale, NOTHING)
