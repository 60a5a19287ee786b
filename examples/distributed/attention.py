# SPDX-License-Identifier: MIT
"""What the attention examples share: one step of online softmax, and the float64 reference with its error bound."""

import common
import torch

import tilescale.language as T


@T.macro
def softmax_step(scores, top, total, acc, scale):
    """Online softmax (Milakov and Gimelshein, 2018): the scores of a tile of keys become weights.

    Args:
        scores: (queries, keys); afterwards 2 ** ((score - top) * scale), the weights of the values.
        top, total: (queries,), the maximum of all scores so far, and the sum of all weights relative to it.
        acc: (queries, columns), the weighted sum of values so far; rescaled when the maximum has grown.
        scale: what scores are multiplied with, times log2(e): the hardware has powers of 2.
    """
    rows, columns = scores.shape
    before = T.alloc((rows,), "float32", level="l0")
    shrink = T.alloc((rows,), "float32", level="l0")
    added = T.alloc((rows,), "float32", level="l0")
    T.copy(top, before)
    T.reduce_max(scores, top, dim=1, clear=False)
    for i in T.Parallel(rows):
        shrink[i] = T.exp2((before[i] - top[i]) * scale)
    for i, j in T.Parallel(rows, columns):
        scores[i, j] = T.exp2((scores[i, j] - top[i]) * scale)
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * shrink[i] + added[i]
    for i, j in T.Parallel(rows, acc.shape[1]):
        acc[i, j] = acc[i, j] * shrink[i]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of float16 queries (..., queries, dim) to all keys and values (..., keys, dim), and an error bound.

    The programs round weights to float16: each may be off by 2**-11 of itself. A score, a float32 sum, that is off by e
    changes its weight and the sum of all weights by a factor of exp(e), about 1 + e each.
    """
    q, k, v = q.double() * q.shape[-1] ** -0.5, k.double(), v.double()
    weights = (q @ k.mT).softmax(-1)
    score_error = common.rounding(q.shape[-1], q.abs() @ k.abs().mT).amax(-1, keepdim=True)
    return weights @ v, (2.0**-10 + 2 * score_error) * (weights @ v.abs())
