# SPDX-License-Identifier: MIT
"""Recurrences over time: gated linear attention in chunks, and a state-space scan with one channel a thread."""

import torch

from .base import PlainKernel, f64, poison, randn

BATCH, LENGTH, HEADS, WIDTH, CHUNK = 1, 128, 2, 64, 64
SHAPE = (BATCH, LENGTH, HEADS, WIDTH)


def chunked_linear_attention(T):
    """o_t = q_t S_t with S_t = exp(a_t) S_(t-1) + k_t^T v_t, a chunk at a time.

    With c the running sum of a inside the chunk, row i of the chunk is exp(c_i) q_i S plus the masked product
    of exp(c_i - c_j) (q_i k_j) with v_j, and the state becomes exp(c_last) S plus k^T v weighted by exp(c_last - c_j).
    """

    @T.prim_func
    def main(
        Q: T.Tensor(SHAPE, T.float16),
        K: T.Tensor(SHAPE, T.float16),
        V: T.Tensor(SHAPE, T.float16),
        log_decay: T.Tensor((BATCH, HEADS, LENGTH), T.float32),
        out: T.Tensor(SHAPE, T.float32),
    ):
        with T.Kernel(HEADS, BATCH, threads=128) as (bx, by):
            q_tile = T.alloc_shared((CHUNK, WIDTH), T.float16)
            k_tile = T.alloc_shared((CHUNK, WIDTH), T.float16)
            k_weighted = T.alloc_shared((CHUNK, WIDTH), T.float16)
            v_tile = T.alloc_shared((CHUNK, WIDTH), T.float16)
            state_tile = T.alloc_shared((WIDTH, WIDTH), T.float16)
            decay = T.alloc_shared((CHUNK,), T.float32)
            scores = T.alloc_fragment((CHUNK, CHUNK), T.float32)
            probs = T.alloc_fragment((CHUNK, CHUNK), T.float16)
            acc = T.alloc_fragment((CHUNK, WIDTH), T.float32)
            state = T.alloc_fragment((WIDTH, WIDTH), T.float32)
            T.clear(state)
            for chunk in T.serial(LENGTH // CHUNK):
                T.copy(Q[by, chunk * CHUNK : (chunk + 1) * CHUNK, bx, :], q_tile)
                T.copy(K[by, chunk * CHUNK : (chunk + 1) * CHUNK, bx, :], k_tile)
                T.copy(V[by, chunk * CHUNK : (chunk + 1) * CHUNK, bx, :], v_tile)
                T.copy(log_decay[by, bx, chunk * CHUNK : (chunk + 1) * CHUNK], decay)
                T.cumsum(decay)
                T.copy(state, state_tile)
                T.gemm(q_tile, state_tile, acc, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for i, j in T.Parallel(CHUNK, WIDTH):
                    acc[i, j] *= T.exp(decay[i])
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    scores[i, j] = T.if_then_else(i >= j, scores[i, j] * T.exp(decay[i] - decay[j]), 0)
                T.copy(scores, probs)
                T.gemm(probs, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(CHUNK, WIDTH):
                    k_weighted[i, j] = k_tile[i, j] * T.exp(decay[CHUNK - 1] - decay[i])
                for i, j in T.Parallel(WIDTH, WIDTH):
                    state[i, j] *= T.exp(decay[CHUNK - 1])
                T.gemm(k_weighted, v_tile, state, transpose_A=True)
                T.copy(acc, out[by, chunk * CHUNK : (chunk + 1) * CHUNK, bx, :])

    return main


def state_space_scan(T):
    """h_t = exp(d_t a) h_(t-1) + d_t b_t x_t and y_t = c_t h_t, four states a channel in the registers of a thread."""
    steps, channels, states = 12, 64, 4

    @T.prim_func
    def main(
        x: T.Tensor((steps, channels), T.float32),
        delta: T.Tensor((steps, channels), T.float32),
        rate: T.Tensor((channels, states), T.float32),
        write: T.Tensor((steps, states), T.float32),
        read: T.Tensor((steps, states), T.float32),
        out: T.Tensor((steps, channels), T.float32),
    ):
        with T.Kernel(channels // 32, threads=32) as bx:
            channel = bx * 32 + T.get_thread_binding()
            hidden = T.alloc_local((states,), T.float32)
            total = T.alloc_var(T.float32)
            for s in T.unroll(states):
                hidden[s] = 0
            for t in T.serial(steps):
                total = 0.0
                for s in T.unroll(states):
                    hidden[s] = (
                        T.exp(delta[t, channel] * rate[channel, s]) * hidden[s]
                        + delta[t, channel] * write[t, s] * x[t, channel]
                    )
                    total = total + read[t, s] * hidden[s]
                out[t, channel] = total

    return main


def _linear_inputs(rng):
    tensors = [randn(rng, *SHAPE, scale=0.3) for _ in range(3)]
    return [*tensors, -torch.rand(BATCH, HEADS, LENGTH, generator=rng) * 0.1, poison(*SHAPE)]


def _linear_reference(args):
    q, k, v, log_decay = (f64(arg) for arg in args[:4])
    state, rows = torch.zeros(BATCH, HEADS, WIDTH, WIDTH, dtype=torch.float64), []
    for t in range(LENGTH):
        state = state * log_decay[:, :, t].exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append((q[:, t, :, None, :] @ state).squeeze(2))
    return {4: torch.stack(rows, 1)}


def _scan_inputs(rng):
    return [
        randn(rng, 12, 64, dtype=torch.float32),
        torch.rand(12, 64, generator=rng),
        -torch.rand(64, 4, generator=rng),
        randn(rng, 12, 4, dtype=torch.float32),
        randn(rng, 12, 4, dtype=torch.float32),
        poison(12, 64),
    ]


def _scan_reference(args):
    x, delta, rate, write, read = (f64(arg) for arg in args[:5])
    hidden, rows = torch.zeros(64, 4, dtype=torch.float64), []
    for t in range(12):
        step = delta[t][:, None]
        hidden = torch.exp(step * rate) * hidden + step * write[t] * x[t][:, None]
        rows.append(hidden @ read[t])
    return {5: torch.stack(rows)}


KERNELS = (
    PlainKernel(
        name="chunked_linear_attention",
        build=chunked_linear_attention,
        inputs=_linear_inputs,
        reference=_linear_reference,
        covers=("linear attention", "cumsum", "gemm", "register operand", "transpose_A"),
        atol=1e-2,
    ),
    PlainKernel(
        name="state_space_scan",
        build=state_space_scan,
        inputs=_scan_inputs,
        reference=_scan_reference,
        covers=("alloc_local", "alloc_var", "unroll", "exp"),
        atol=1e-4,
    ),
)
