# SPDX-License-Identifier: MIT
"""Launches other than over a grid, and extents that are expressions of an open one."""

import torch

from .base import PlainKernel, f64, poison, randint, randn


def threads_alone(T):
    """No grid: one program."""

    @T.prim_func
    def main(x: T.Tensor((64,), T.float32), out: T.Tensor((64,), T.float32)):
        with T.Kernel(threads=64):
            tile = T.alloc_shared((64,), T.float32)
            tx = T.get_thread_binding()
            tile[tx] = x[tx] * 2.0
            T.sync_threads()
            out[tx] = tile[63 - tx]

    return main


def nothing_named(T):
    """Neither a grid nor threads: one program of 128 threads."""

    @T.prim_func
    def main(x: T.Tensor((96,), T.float32), out: T.Tensor((96,), T.float32)):
        with T.Kernel():
            for i in T.Parallel(96):
                out[i] = (x[i] + 1.0) * 2.0

    return main


def bound_loops(T):
    """Loops bound to blocks and threads by hand, the fastest axis of blocks innermost."""

    @T.prim_func
    def main(x: T.Tensor((3, 2, 48), T.float32), out: T.Tensor((3, 2, 48), T.float32)):
        for i in T.thread_binding(3, "blockIdx.y"):
            for j in T.thread_binding(2, "blockIdx.x"):
                for k in T.thread_binding(48, "threadIdx.x"):
                    out[i, j, k] = x[i, j, k] + T.cast(i * 2 + j, T.float32)

    return main


def bound_threads(T):
    """A loop over threads without one over blocks."""

    @T.prim_func
    def main(x: T.Tensor((40,), T.float32), out: T.Tensor((40,), T.float32)):
        for k in T.thread_binding(40, "threadIdx.x"):
            out[k] = x[39 - k]

    return main


def multiples(T):
    """Extents n * 4 and n + 1: no argument is n itself."""
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n * 4,), T.int32), out: T.Tensor((n + 1,), T.int32)):
        with T.Kernel(n, threads=32) as bx:
            if T.get_thread_binding() == 0:
                out[bx] = x[bx * 4] + x[bx * 4 + 3]
                if bx == 0:
                    out[n] = n

    return main


def _bound_reference(x):
    numbers = torch.arange(6, dtype=torch.float64).reshape(3, 2, 1)
    return f64(x) + numbers


KERNELS = (
    PlainKernel(
        "launch_threads_alone",
        threads_alone,
        lambda rng: [randn(rng, 64, dtype=torch.float32), poison(64)],
        lambda given: {1: f64(given[0]).flip(0) * 2},
        covers=("launch without a grid",),
    ),
    PlainKernel(
        "launch_nothing_named",
        nothing_named,
        lambda rng: [randn(rng, 96, dtype=torch.float32), poison(96)],
        lambda given: {1: (f64(given[0]) + 1) * 2},
        covers=("launch without a grid",),
    ),
    PlainKernel(
        "launch_bound_loops",
        bound_loops,
        lambda rng: [randn(rng, 3, 2, 48, dtype=torch.float32), poison(3, 2, 48)],
        lambda given: {1: _bound_reference(given[0])},
        covers=("thread_binding",),
    ),
    PlainKernel(
        "launch_bound_threads",
        bound_threads,
        lambda rng: [randn(rng, 40, dtype=torch.float32), poison(40)],
        lambda given: {1: f64(given[0]).flip(0)},
        covers=("thread_binding",),
    ),
    PlainKernel(
        "extents_multiples",
        multiples,
        lambda rng: [randint(rng, -9, 9, 20), poison(6, dtype=torch.int32)],
        lambda given: {1: torch.cat([given[0].reshape(5, 4)[:, [0, 3]].sum(1), torch.tensor([5])]).to(torch.int64)},
        covers=("symbolic shapes",),
    ),
)
