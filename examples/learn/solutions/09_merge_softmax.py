# SPDX-License-Identifier: MIT
"""Solution: subtract the larger log-sum first, so that no exponential is above one and one of them is one.

Online softmax takes the same step from block to block of keys (Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018), here between devices. The merge is associative, so any algorithm of an all-reduce may be used.
"""

import tilescale.language as T

ROWS, WIDTH = 16, 8


def merge(a, b):
    """Merge two results into the result over the keys of both."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    top = T.max(lse_a, lse_b)
    weight_a, weight_b = T.exp(lse_a - top), T.exp(lse_b - top)
    total = weight_a + weight_b
    return (out_a * weight_a + out_b * weight_b) / total, top + T.log(total)


def program(devices: int):
    """All-reduce two tensors at once."""

    @T.prim_func
    def merge_softmax(Out: T.Tensor((ROWS, WIDTH), "float32"), Lse: T.Tensor((ROWS,), "float32")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce(Out, Lse, fn=merge)

    return merge_softmax
