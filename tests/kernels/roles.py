# SPDX-License-Identifier: MIT
"""Warps with different jobs: producers and consumers, barriers between them, schedules of warp specialisation."""

import torch

from .base import HOPPER_UP, PlainKernel, f64, poison, randn


def producer_consumer(T):
    """A producer warpgroup fills a ring of tiles by TMA, a consumer warpgroup multiplies; barriers written by hand."""
    m, n, k, block_k, stages = 64, 64, 128, 32, 2

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), B: T.Tensor((n, k), T.float16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=256):
            a_ring = T.alloc_shared((stages, m, block_k), T.float16)
            b_ring = T.alloc_shared((stages, n, block_k), T.float16)
            acc = T.alloc_fragment((m, n), T.float32)
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([128] * stages)
            tx = T.get_thread_binding()
            if tx >= 128:
                T.set_max_nreg(24, 0)
                for ko in T.serial(k // block_k):
                    T.mbarrier_wait_parity(empty[ko % stages], ((ko // stages) % 2) ^ 1)
                    if T.shuffle_elect(128):
                        T.tma_copy(
                            A[:, ko * block_k : ko * block_k + block_k],
                            a_ring[ko % stages, :, :],
                            barrier=full[ko % stages],
                        )
                        T.tma_copy(
                            B[:, ko * block_k : ko * block_k + block_k],
                            b_ring[ko % stages, :, :],
                            barrier=full[ko % stages],
                        )
                        T.barrier_arrive(full[ko % stages])
            else:
                T.set_max_nreg(240, 1)
                T.clear(acc)
                for ko in T.serial(k // block_k):
                    T.mbarrier_wait_parity(full[ko % stages], (ko // stages) % 2)
                    T.gemm(a_ring[ko % stages, :, :], b_ring[ko % stages, :, :], acc, transpose_B=True)
                    T.barrier_arrive(empty[ko % stages])
                T.copy(acc, C)

    return main


def named_barriers(T):
    """The second half of the block squares a tile and signals; the first half waits and adds its own."""

    @T.prim_func
    def main(x: T.Tensor((2, 128), T.float32), out: T.Tensor((128,), T.float32)):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            exchange = T.alloc_shared((128,), T.float32)
            if tx < 128:
                T.sync_threads(8, 256)
                out[tx] = x[0, tx] + exchange[tx]
            else:
                exchange[tx - 128] = x[1, tx - 128] * x[1, tx - 128]
                T.named_barrier_arrive(8, 256)

    return main


def split_k_warpgroups(T):
    """Two warpgroups multiply half of K each; the second hands its sum to the first through shared memory."""
    m, n, k = 64, 64, 64

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), B: T.Tensor((k, n), T.float16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=256):
            a_tile = T.alloc_shared((m, k), T.float16)
            b_tile = T.alloc_shared((k, n), T.float16)
            exchange = T.alloc_shared((m, n), T.float32)
            first = T.alloc_fragment((m, n), T.float32)
            second = T.alloc_fragment((m, n), T.float32)
            T.copy(A, a_tile)
            T.copy(B, b_tile)
            with T.ws(0):
                T.clear(first)
                T.gemm(a_tile[:, 0 : k // 2], b_tile[0 : k // 2, :], first)
            with T.ws(1):
                T.clear(second)
                T.gemm(a_tile[:, k // 2 : k], b_tile[k // 2 : k, :], second)
                T.copy(second, exchange)
            with T.ws(0):
                for i, j in T.Parallel(m, n):
                    first[i, j] += exchange[i, j]
                T.copy(first, C)

    return main


def scheduled_roles(T):
    """A load role and a math role; roles, pipelines and instruction order given by an explicit schedule."""
    m, n, k, block_k = 64, 64, 128, 32

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), B: T.Tensor((n, k), T.float16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=256):
            a_tile = T.alloc_shared((m, block_k), T.float16)
            b_tile = T.alloc_shared((n, block_k), T.float16)
            acc = T.alloc_fragment((m, n), T.float32)
            T.annotate_ws_schedule(
                T.WSSchedule(
                    num_warps=8,
                    roles=[
                        T.WSRole("math", warps_lo=0, warps_hi=4, max_nreg=240),
                        T.WSRole("load", warps_lo=4, warps_hi=8, max_nreg=24),
                    ],
                    pipelines=[T.WSPipeline("tiles", [a_tile, b_tile], depth=2)],
                    scopes=[
                        T.WSScope(
                            "steps",
                            {
                                "load": [
                                    T.WSSync.producer_acquire("tiles"),
                                    "load_a",
                                    "load_b",
                                    T.WSSync.producer_commit("tiles"),
                                ],
                                "math": [T.WSSync.consumer_wait("tiles"), "mma", T.WSSync.consumer_release("tiles")],
                            },
                        ),
                        T.WSScope(T.WSScope.ROOT, {"load": ["steps"], "math": ["zero", "steps", "store"]}),
                    ],
                )
            )
            T.fill(acc, 0, annotations={T.WSID: "zero"})
            for ko in T.serial(k // block_k, annotations={T.WSID: "steps"}):
                T.copy(A[0, ko * block_k], a_tile, annotations={T.WSID: "load_a"})
                T.copy(B[0, ko * block_k], b_tile, annotations={T.WSID: "load_b"})
                T.gemm(a_tile, b_tile, acc, transpose_B=True, annotations={T.WSID: "mma"})
            T.copy(acc, C, annotations={T.WSID: "store"})

    return main


def async_ring(T):
    """Explicit asynchronous copies, and a software pipeline whose order and stages are given by hand."""
    rows, cols, block = 16, 256, 64

    @T.prim_func
    def main(A: T.Tensor((rows, cols), T.float32), out: T.Tensor((rows, cols), T.float32), first: T.Tensor((16, 64))):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((rows, block), T.float32)
            regs = T.alloc_fragment((rows, block), T.float32)
            T.async_copy(A[:, 0:block], tile)
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(tile, first)
            T.sync_threads()
            for step in T.Pipelined(cols // block, order=[0, 1, 2, 3], stage=[0, 1, 1, 1]):
                T.copy(A[0, step * block], tile)
                T.copy(tile, regs)
                for i, j in T.Parallel(rows, block):
                    regs[i, j] = regs[i, j] * (step + 1)
                T.copy(regs, out[0, step * block])

    return main


def _product(args):
    return {2: f64(args[0]) @ f64(args[1]).T}


KERNELS = (
    PlainKernel(
        name="producer_consumer",
        build=producer_consumer,
        inputs=lambda rng: [randn(rng, 64, 128), randn(rng, 64, 128), poison(64, 64)],
        reference=_product,
        covers=("alloc_barrier", "mbarrier_wait_parity", "barrier_arrive", "tma_copy", "set_max_nreg", "shuffle_elect"),
        targets=HOPPER_UP,
        why_not={"sm_80": "no tensor memory accelerator"},
    ),
    PlainKernel(
        name="named_barriers",
        build=named_barriers,
        inputs=lambda rng: [randn(rng, 2, 128, dtype=torch.float32), poison(128)],
        reference=lambda args: {1: f64(args[0][0]) + f64(args[0][1]).square()},
        covers=("named_barrier_arrive", "sync_threads", "thread roles"),
        atol=1e-5,
    ),
    PlainKernel(
        name="split_k_warpgroups",
        build=split_k_warpgroups,
        inputs=lambda rng: [randn(rng, 64, 64), randn(rng, 64, 64), poison(64, 64)],
        reference=lambda args: {2: f64(args[0]) @ f64(args[1])},
        covers=("ws", "gemm on slices", "thread roles"),
    ),
    PlainKernel(
        name="scheduled_roles",
        build=scheduled_roles,
        inputs=lambda rng: [randn(rng, 64, 128), randn(rng, 64, 128), poison(64, 64)],
        reference=_product,
        covers=("annotate_ws_schedule", "WSSchedule", "gemm"),
    ),
    PlainKernel(
        name="async_ring",
        build=async_ring,
        inputs=lambda rng: [randn(rng, 16, 256, dtype=torch.float32), poison(16, 256), poison(16, 64)],
        reference=lambda args: {
            1: f64(args[0]) * torch.arange(1, 5).repeat_interleave(64),
            2: f64(args[0][:, :64]),
        },
        covers=("async_copy", "ptx_wait_group", "Pipelined order and stage"),
        atol=1e-5,
    ),
)
