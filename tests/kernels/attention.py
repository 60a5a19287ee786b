# SPDX-License-Identifier: MIT
"""Softmax attention: forward with an online softmax, decoding with a split or paged cache, latent attention."""

import math

import torch

from .base import PlainKernel, f64, poison, randint, randn

LOG2E = math.log2(math.e)


def online_update(T):
    """The macro that all kernels here share: fold one block of scores into running maximum, sum and output."""

    @T.macro
    def fold(scores, probs, acc, high, previous, scale, partial, total, rows, cols, width, factor):
        T.copy(high, previous)
        T.reduce_max(scores, high, dim=1, clear=False)
        for i in T.Parallel(rows):
            scale[i] = T.exp2((previous[i] - high[i]) * factor)
        for i, j in T.Parallel(rows, cols):
            scores[i, j] = T.exp2((scores[i, j] - high[i]) * factor)
        T.reduce_sum(scores, partial, dim=1)
        for i in T.Parallel(rows):
            total[i] = total[i] * scale[i] + partial[i]
        for i, j in T.Parallel(rows, width):
            acc[i, j] *= scale[i]
        T.copy(scores, probs)

    return fold


def flash_forward(causal: bool):
    def build(T):
        batch, heads, length, width, block_m, block_n = 1, 2, 128, 64, 64, 64
        factor = LOG2E / math.sqrt(width)
        shape = (batch, length, heads, width)
        fold = online_update(T)

        @T.prim_func
        def main(
            Q: T.Tensor(shape, T.float16),
            K: T.Tensor(shape, T.float16),
            V: T.Tensor(shape, T.float16),
            out: T.Tensor(shape, T.float16),
        ):
            with T.Kernel(T.ceildiv(length, block_m), heads, batch, threads=128) as (bx, by, bz):
                q_tile = T.alloc_shared((block_m, width), T.float16)
                k_tile = T.alloc_shared((block_n, width), T.float16)
                v_tile = T.alloc_shared((block_n, width), T.float16)
                scores = T.alloc_fragment((block_m, block_n), T.float32)
                probs = T.alloc_fragment((block_m, block_n), T.float16)
                acc = T.alloc_fragment((block_m, width), T.float32)
                high = T.alloc_fragment((block_m,), T.float32)
                previous = T.alloc_fragment((block_m,), T.float32)
                scale = T.alloc_fragment((block_m,), T.float32)
                partial = T.alloc_fragment((block_m,), T.float32)
                total = T.alloc_fragment((block_m,), T.float32)
                T.copy(Q[bz, bx * block_m : (bx + 1) * block_m, by, :], q_tile)
                T.clear(acc)
                T.clear(total)
                T.fill(high, -T.infinity(T.float32))
                blocks = T.min(length // block_n, bx + 1) if causal else length // block_n
                for ko in T.Pipelined(blocks, num_stages=1 if causal else 2):
                    T.copy(K[bz, ko * block_n : (ko + 1) * block_n, by, :], k_tile)
                    if causal:
                        for i, j in T.Parallel(block_m, block_n):
                            visible = bx * block_m + i >= ko * block_n + j
                            scores[i, j] = T.if_then_else(visible, 0, -T.infinity(T.float32))
                    else:
                        T.clear(scores)
                    T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    fold(scores, probs, acc, high, previous, scale, partial, total, block_m, block_n, width, factor)
                    T.copy(V[bz, ko * block_n : (ko + 1) * block_n, by, :], v_tile)
                    T.gemm(probs, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(block_m, width):
                    acc[i, j] /= total[i]
                T.copy(acc, out[bz, bx * block_m : (bx + 1) * block_m, by, :])

        return main

    return build


def split_decode(T):
    """One query token, grouped heads, paged cache: each block takes a part of the pages, a second grid combines."""
    groups, group_heads, width, page, pages, splits = 2, 16, 64, 32, 4, 2
    heads = groups * group_heads
    factor = LOG2E / math.sqrt(width)
    fold = online_update(T)

    @T.prim_func
    def main(
        Q: T.Tensor((heads, width), T.float16),
        K: T.Tensor((pages + 2, page, groups, width), T.float16),
        V: T.Tensor((pages + 2, page, groups, width), T.float16),
        table: T.Tensor((pages,), T.int32),
        length: T.Tensor((1,), T.int32),
        lse: T.Tensor((heads, splits), T.float32),
        partial_out: T.Tensor((heads, splits, width), T.float32),
        out: T.Tensor((heads, width), T.float16),
    ):
        with T.Kernel(groups, splits, threads=32) as (bx, by):
            q_tile = T.alloc_shared((group_heads, width), T.float16)
            k_tile = T.alloc_shared((page, width), T.float16)
            v_tile = T.alloc_shared((page, width), T.float16)
            scores = T.alloc_fragment((group_heads, page), T.float32)
            probs = T.alloc_fragment((group_heads, page), T.float16)
            acc = T.alloc_fragment((group_heads, width), T.float32)
            high = T.alloc_fragment((group_heads,), T.float32)
            previous = T.alloc_fragment((group_heads,), T.float32)
            scale = T.alloc_fragment((group_heads,), T.float32)
            partial = T.alloc_fragment((group_heads,), T.float32)
            total = T.alloc_fragment((group_heads,), T.float32)
            T.copy(Q[bx * group_heads, 0], q_tile)
            T.clear(acc)
            T.clear(total)
            T.fill(high, -T.infinity(T.float32))
            for step in T.serial(pages // splits):
                block = table[by * (pages // splits) + step]
                start = (by * (pages // splits) + step) * page
                T.copy(K[block, :, bx, :], k_tile)
                T.copy(V[block, :, bx, :], v_tile)
                T.clear(scores)
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(group_heads, page):
                    scores[i, j] = T.if_then_else(start + j < length[0], scores[i, j], -T.infinity(T.float32))
                fold(scores, probs, acc, high, previous, scale, partial, total, group_heads, page, width, factor)
                T.gemm(probs, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(group_heads, width):
                partial_out[bx * group_heads + i, by, j] = acc[i, j] / total[i]
            for i in T.Parallel(group_heads):
                lse[bx * group_heads + i, by] = high[i] * factor + T.log2(total[i])
        with T.Kernel(heads, threads=64) as bx:
            best = T.alloc_var(T.float32, init=-1e30)
            weight = T.alloc_var(T.float32, init=0.0)
            acc = T.alloc_fragment((width,), T.float32)
            T.clear(acc)
            for split in T.serial(splits):
                best = T.max(best, lse[bx, split])
            for split in T.serial(splits):
                weight = weight + T.exp2(lse[bx, split] - best)
                for j in T.Parallel(width):
                    acc[j] += partial_out[bx, split, j] * T.exp2(lse[bx, split] - best)
            for j in T.Parallel(width):
                out[bx, j] = acc[j] / weight

    return main


def latent_decode(T):
    """Multi-head latent attention: 32 heads share one latent cache that is key and value; a rotary part adds keys."""
    batch, heads, length, latent, rotary_width, block = 2, 32, 64, 64, 32, 32
    factor = LOG2E / math.sqrt(latent + rotary_width)
    fold = online_update(T)

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, latent), T.bfloat16),
        Q_rotary: T.Tensor((batch, heads, rotary_width), T.bfloat16),
        cache: T.Tensor((batch, length, latent), T.bfloat16),
        cache_rotary: T.Tensor((batch, length, rotary_width), T.bfloat16),
        out: T.Tensor((batch, heads, latent), T.bfloat16),
    ):
        with T.Kernel(batch, threads=64) as bx:
            q_tile = T.alloc_shared((heads, latent), T.bfloat16)
            q_rotary_tile = T.alloc_shared((heads, rotary_width), T.bfloat16)
            cache_tile = T.alloc_shared((block, latent), T.bfloat16)
            rotary_tile = T.alloc_shared((block, rotary_width), T.bfloat16)
            scores = T.alloc_fragment((heads, block), T.float32)
            probs = T.alloc_fragment((heads, block), T.bfloat16)
            acc = T.alloc_fragment((heads, latent), T.float32)
            high = T.alloc_fragment((heads,), T.float32)
            previous = T.alloc_fragment((heads,), T.float32)
            scale = T.alloc_fragment((heads,), T.float32)
            partial = T.alloc_fragment((heads,), T.float32)
            total = T.alloc_fragment((heads,), T.float32)
            T.copy(Q[bx, :, :], q_tile)
            T.copy(Q_rotary[bx, :, :], q_rotary_tile)
            T.clear(acc)
            T.clear(total)
            T.fill(high, -T.infinity(T.float32))
            for ko in T.Pipelined(length // block, num_stages=1):
                T.copy(cache[bx, ko * block : (ko + 1) * block, :], cache_tile)
                T.copy(cache_rotary[bx, ko * block : (ko + 1) * block, :], rotary_tile)
                T.gemm(q_tile, cache_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                T.gemm(q_rotary_tile, rotary_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                fold(scores, probs, acc, high, previous, scale, partial, total, heads, block, latent, factor)
                T.gemm(probs, cache_tile, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(heads, latent):
                acc[i, j] /= total[i]
            T.copy(acc, out[bx, :, :])

    return main


def _attend(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _flash_kernel(causal: bool) -> PlainKernel:
    def reference(args):
        q, k, v = (f64(arg).permute(0, 2, 1, 3) for arg in args[:3])
        mask = torch.ones(128, 128, dtype=torch.bool).tril() if causal else None
        return {3: _attend(q, k, v, mask).permute(0, 2, 1, 3)}

    return PlainKernel(
        name="flash_causal" if causal else "flash_full",
        build=flash_forward(causal),
        inputs=lambda rng: [*(randn(rng, 1, 128, 2, 64) for _ in range(3)), poison(1, 128, 2, 64, dtype=torch.float16)],
        reference=reference,
        covers=("attention", "macro", "pipelined", "reduce_max", "exp2", "register operand"),
        atol=5e-3,
    )


def _split_inputs(rng):
    return [
        randn(rng, 32, 64),
        randn(rng, 6, 32, 2, 64),
        randn(rng, 6, 32, 2, 64),
        torch.randperm(6, generator=rng)[:4].to(torch.int32),
        randint(rng, 70, 110, 1),
        poison(32, 2),
        poison(32, 2, 64),
        poison(32, 64, dtype=torch.float16),
    ]


def _split_reference(args):
    q, pages_k, pages_v, table, length = f64(args[0]), f64(args[1]), f64(args[2]), args[3].long(), int(args[4])
    k, v = (pool[table].reshape(128, 2, 64).permute(1, 0, 2) for pool in (pages_k, pages_v))
    mask = torch.arange(128) < length
    return {7: _attend(q.reshape(2, 16, 64), k, v, mask).reshape(32, 64)}


def _latent_inputs(rng):
    shapes = (2, 32, 64), (2, 32, 32), (2, 64, 64), (2, 64, 32)
    tensors = [randn(rng, *shape, dtype=torch.bfloat16) for shape in shapes]
    return [*tensors, poison(2, 32, 64, dtype=torch.bfloat16)]


def _latent_reference(args):
    q, q_rotary, cache, cache_rotary = (f64(arg) for arg in args[:4])
    return {4: _attend(torch.cat([q, q_rotary], -1), torch.cat([cache, cache_rotary], -1), cache)}


KERNELS = (
    _flash_kernel(False),
    _flash_kernel(True),
    PlainKernel(
        name="split_decode",
        build=split_decode,
        inputs=_split_inputs,
        reference=_split_reference,
        covers=("attention", "paged", "split KV", "two kernels", "gather"),
        atol=5e-3,
    ),
    PlainKernel(
        name="latent_decode",
        build=latent_decode,
        inputs=_latent_inputs,
        reference=_latent_reference,
        covers=("attention", "MLA", "two gemms into one accumulator", "pipelined"),
        rtol=2e-2,
        atol=2e-2,
    ),
)
