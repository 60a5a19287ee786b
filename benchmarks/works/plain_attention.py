# SPDX-License-Identifier: MIT
"""Attention on one device, in plain TileLang."""

import math

import tilescale.language as T


def flash_attention(tokens: int, heads: int, of_keys: int, dim: int, tile: int = 128):
    """Causal attention (FlashAttention-2, arXiv:2307.08691)."""
    scale = math.log2(math.e) * dim**-0.5

    @T.prim_func
    def plain_attention(
        Q: T.Tensor((1, tokens, heads, dim), "bfloat16"),
        K: T.Tensor((1, tokens, of_keys, dim), "bfloat16"),
        V: T.Tensor((1, tokens, of_keys, dim), "bfloat16"),
        Out: T.Tensor((1, tokens, heads, dim), "bfloat16"),
    ):
        with T.Kernel(tokens // tile, heads, threads=2 * tile) as (number, head):
            q = T.alloc_shared((tile, dim), "bfloat16")
            k = T.alloc_shared((tile, dim), "bfloat16")
            v = T.alloc_shared((tile, dim), "bfloat16")
            out = T.alloc_shared((tile, dim), "bfloat16")
            scores = T.alloc_fragment((tile, tile), "float32")
            weights = T.alloc_fragment((tile, tile), "bfloat16")
            acc = T.alloc_fragment((tile, dim), "float32")
            top = T.alloc_fragment((tile,), "float32")
            before = T.alloc_fragment((tile,), "float32")
            added = T.alloc_fragment((tile,), "float32")
            total = T.alloc_fragment((tile,), "float32")
            first = (tokens // tile - 1 - number) * tile  # the longest rows come first
            T.copy(Q[0, first : first + tile, head, :], q)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for step in T.Pipelined(first // tile + 1, num_stages=2):
                at = step * tile
                T.copy(K[0, at : at + tile, head * of_keys // heads, :], k)
                for i, j in T.Parallel(tile, tile):
                    scores[i, j] = T.if_then_else(at + j <= first + i, 0, -1e30)
                T.gemm(q, k, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(V[0, at : at + tile, head * of_keys // heads, :], v)
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for i in T.Parallel(tile):
                    before[i] = T.exp2((before[i] - top[i]) * scale)
                for i, j in T.Parallel(tile, tile):
                    scores[i, j] = T.exp2((scores[i, j] - top[i]) * scale)
                T.reduce_sum(scores, added, dim=1)
                for i in T.Parallel(tile):
                    total[i] = total[i] * before[i] + added[i]
                for i, j in T.Parallel(tile, dim):
                    acc[i, j] = acc[i, j] * before[i]
                T.copy(scores, weights)
                T.gemm(weights, v, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(tile, dim):
                acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, out)
            T.copy(out, Out[0, first : first + tile, head, :])

    return plain_attention
