# SPDX-License-Identifier: MIT
"""Ulysses attention: from a share of the tokens to a share of the heads and back, by two all-to-alls.

    Out = softmax(Q K^T) V, head by head      (DeepSpeed Ulysses, Jacobs et al., 2023)

               before                       attention                          after
    device 0:  all heads, tokens 0-255      heads 0, 1, all tokens             all heads, tokens 0-255
    device 1:  all heads, tokens 256-511    heads 2, 3, all tokens             all heads, tokens 256-511
                              all-to-all                         all-to-all

The idea: change the dimension in which a tensor is split instead of gathering it on all devices. The rest of a model
works on tokens and wants them split by tokens; attention mixes all tokens of one head and wants whole heads. An
all-to-all along the heads turns one into the other: part j of a device's heads goes to device j. Each device sends
(n-1)/n of its share once, for queries, keys and values together; on a ring (13) keys and values go round n-1 times.

Where the tokens are: device r's part arrives as part r, so token t of head g is row t % rows of part t // rows.

The price is a limit: there are at most as many devices as heads, and they divide.

Things to try: 12 heads on 8 devices, and what the error says; grouped queries (fewer heads of keys than devices: which
devices need a copy?); the exchange by hand, tile by tile as in 05, so that attention starts before all tokens have
arrived.
"""

import attention
import common
import torch

import tilescale.language as T

DIM, TILE = 64, 64


def ulysses(devices: int, heads: int, tokens: int, dim: int):
    """Compute tile i of all tokens for head g of this device's group in block (i, g).

    `tokens` is a multiple of devices * TILE, `heads` of devices.
    """
    common.whole("tokens", tokens, devices * TILE)
    rows, group = tokens // devices, heads // devices
    tiles = rows // TILE
    scale = attention.scale(dim)

    @T.prim_func
    def ulysses_attention(
        QKV: T.Tensor((heads, 3, tokens, dim), "float16"), Out: T.Tensor((heads, tokens, dim), "float16")
    ):
        with T.Kernel(device=devices, block=(tokens // TILE, group), threads=128) as (i, g):
            given = T.alloc((heads, 3, rows, dim), "float16", level="l2")
            result = T.alloc((heads, rows, dim), "float16", level="l2")
            with T.Scale("device"):
                QKV_dev = T.view(QKV, layout=T.Shard(2))
                Out_dev = T.view(Out, layout=T.Shard(1))
                T.all_to_all(QKV_dev, given, dim=0)
            with T.Scale("block"):
                q = T.alloc((TILE, dim), "float16", level="l1")
                k = T.alloc((TILE, dim), "float16", level="l1")
                v = T.alloc((TILE, dim), "float16", level="l1")
                scores = T.alloc((TILE, TILE), "float32", level="l0")
                weights = T.alloc((TILE, TILE), "float16", level="l1")
                acc = T.alloc((TILE, dim), "float32", level="l0")
                top = T.alloc((TILE,), "float32", level="l0")
                total = T.alloc((TILE,), "float32", level="l0")
                T.copy(given[i // tiles * group + g, 0, i % tiles * TILE, 0], q)
                T.clear(acc)
                T.clear(total)
                T.fill(top, -1e30)
                for t in T.Pipelined(tokens // TILE, num_stages=2):
                    T.copy(given[t // tiles * group + g, 1, t % tiles * TILE, 0], k)
                    T.copy(given[t // tiles * group + g, 2, t % tiles * TILE, 0], v)
                    T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                    attention.softmax_step(scores, top, total, acc, scale)
                    T.copy(scores, weights)
                    T.gemm(weights, v, acc)
                for r, j in T.Parallel(TILE, dim):
                    acc[r, j] = acc[r, j] / total[r]
                T.copy(acc, result[i // tiles * group + g, i % tiles * TILE, 0])
            with T.Scale("device"):
                T.all_to_all(result, Out_dev, dim=0)

    return ulysses_attention


@common.options(size=512)
def main(devices: int, size: int, seed: int) -> None:
    """Compute attention of about `size` tokens, a whole number of tiles on every device, in eight or more heads."""
    rng = torch.Generator().manual_seed(seed)
    size = -(-size // (devices * TILE)) * devices * TILE
    heads = -(-8 // devices) * devices
    qkv = torch.randn(heads, 3, size, DIM, generator=rng).half()
    shares = [share.contiguous() for share in qkv.chunk(devices, 2)]
    results = [torch.full((heads, size // devices, DIM), torch.nan).half() for _ in range(devices)]
    common.run(ulysses(devices, heads, size, DIM), list(zip(shares, results, strict=True)))
    want, bound = attention.reference(*qkv.unbind(1))
    bound += 2.0**-11 * want.abs()  # the result is rounded too
    common.compare("Ulysses attention", results, want.chunk(devices, 1), bound.chunk(devices, 1))


if __name__ == "__main__":
    main()
