# SPDX-License-Identifier: MIT
"""Thread-block clusters: ranks, barriers, distributed shared memory, multicast."""

import torch

from .base import HOPPER_UP, PlainKernel, f64, poison, randn

_LIMITS = {"targets": HOPPER_UP, "why_not": {"sm_80": "no thread-block clusters"}}


def cluster_ranks(T):
    """Every block writes its rank in the cluster and the number of its cluster."""

    @T.prim_func
    def main(out: T.Tensor((8, 2), T.int32)):
        with T.Kernel(8, threads=32, cluster_dims=(4, 1, 1)) as bx:
            T.pdl_sync()
            if T.get_thread_binding() == 0:
                out[bx, 0] = T.block_rank_in_cluster()
                out[bx, 1] = bx // T.get_cluster_size()

    return main


def neighbour_exchange(T):
    """Each block of a pair sends its tile to the other one's shared memory, between two cluster barriers."""
    rows, cols = 16, 64

    @T.prim_func
    def main(A: T.Tensor((4 * rows, cols), T.float32), out: T.Tensor((4 * rows, cols), T.float32)):
        with T.Kernel(4, threads=64, cluster_dims=2) as bx:
            T.pdl_sync()
            own = T.alloc_shared((rows, cols), T.float32)
            other = T.alloc_shared((rows, cols), T.float32)
            rank = T.block_rank_in_cluster()
            T.copy(A[bx * rows, 0], own)
            T.cluster_sync()
            T.copy_cluster(own, other, dst_block=rank ^ 1)
            T.cluster_sync()
            for i, j in T.Parallel(rows, cols):
                out[bx * rows + i, j] = own[i, j] + 2 * other[i, j]
            T.cluster_sync()

    return main


def ring_exchange(T):
    """Each block of four sends its tile to the next one; the copy itself signals the barrier of the receiver."""
    rows, cols = 16, 64

    @T.prim_func
    def main(A: T.Tensor((4 * rows, cols), T.float32), out: T.Tensor((4 * rows, cols), T.float32)):
        with T.Kernel(4, threads=128, cluster_dims=4) as bx:
            T.pdl_sync()
            own = T.alloc_shared((rows, cols), T.float32)
            other = T.alloc_shared((rows, cols), T.float32)
            arrived = T.alloc_cluster_barrier([1])
            rank = T.block_rank_in_cluster()
            T.copy(A[bx * rows, 0], own)
            T.cluster_sync()
            T.copy_cluster(own, other, dst_block=(rank + 1) % 4, remote_barrier=arrived[0])
            T.mbarrier_wait_parity(arrived[0], 0)
            for i, j in T.Parallel(rows, cols):
                out[bx * rows + i, j] = own[i, j] - other[i, j]
            T.cluster_sync()

    return main


def multicast_gemm(T):
    """Two blocks with different rows of A share each tile of B, loaded to both by one multicast."""
    m, n, k, block_m, block_k = 128, 64, 128, 64, 64

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), B: T.Tensor((n, k), T.float16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(m // block_m, threads=128, cluster_dims=(2, 1, 1)) as bx:
            T.pdl_sync()
            a_tile = T.alloc_shared((block_m, block_k), T.float16)
            b_tile = T.alloc_shared((n, block_k), T.float16)
            acc = T.alloc_fragment((block_m, n), T.float32)
            T.clear(acc)
            T.cluster_sync()
            for ko in T.serial(k // block_k):
                T.copy(A[bx * block_m, ko * block_k], a_tile)
                T.copy_cluster(B[0, ko * block_k], b_tile, cluster_mask=0b11)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
                T.cluster_sync()
            T.copy(acc, C[bx * block_m, 0])

    return main


def split_barrier(T):
    """The two halves of a cluster barrier with work between them, around an exchange through global memory."""

    @T.prim_func
    def main(x: T.Tensor((2, 64), T.float32), row: T.Tensor((2, 64), T.float32), out: T.Tensor((2, 64), T.float32)):
        with T.Kernel(2, threads=64, cluster_dims=2) as bx:
            T.pdl_sync()
            tx = T.get_thread_binding()
            own = T.alloc_var(T.float32)
            T.atomic_store(row[bx, tx], x[bx, tx] * 3, memory_order="relaxed")
            T.cluster_arrive()
            own = x[bx, tx] * x[bx, tx]
            T.cluster_wait()
            out[bx, tx] = own + T.atomic_load(row[bx ^ 1, tx], memory_order="relaxed")

    return main


def _pairs(args):
    own = f64(args[0]).reshape(2, 2, 16, 64)
    return {1: (own + 2 * own.flip(1)).reshape(64, 64)}


def _ring(args):
    own = f64(args[0]).reshape(4, 16, 64)
    return {1: (own - own.roll(1, 0)).reshape(64, 64)}


def _split(args):
    x = f64(args[0])
    return {1: 3 * x, 2: x.square() + 3 * x.flip(0)}


KERNELS = (
    PlainKernel(
        name="cluster_ranks",
        build=cluster_ranks,
        inputs=lambda rng: [poison(8, 2, dtype=torch.int32)],
        reference=lambda args: {0: torch.stack([torch.arange(8) % 4, torch.arange(8) // 4], 1)},
        covers=("cluster_dims", "block_rank_in_cluster"),
        rtol=0.0,
        atol=0.0,
        **_LIMITS,
    ),
    PlainKernel(
        name="neighbour_exchange",
        build=neighbour_exchange,
        inputs=lambda rng: [randn(rng, 64, 64, dtype=torch.float32), poison(64, 64)],
        reference=_pairs,
        covers=("copy_cluster", "cluster_sync", "pdl_sync"),
        atol=1e-5,
        **_LIMITS,
    ),
    PlainKernel(
        name="ring_exchange",
        build=ring_exchange,
        inputs=lambda rng: [randn(rng, 64, 64, dtype=torch.float32), poison(64, 64)],
        reference=_ring,
        covers=("copy_cluster", "remote barrier", "alloc_cluster_barrier"),
        atol=1e-5,
        **_LIMITS,
    ),
    PlainKernel(
        name="multicast_gemm",
        build=multicast_gemm,
        inputs=lambda rng: [randn(rng, 128, 128), randn(rng, 64, 128), poison(128, 64)],
        reference=lambda args: {2: f64(args[0]) @ f64(args[1]).T},
        covers=("copy_cluster", "multicast", "gemm"),
        **_LIMITS,
    ),
    PlainKernel(
        name="split_barrier",
        build=split_barrier,
        inputs=lambda rng: [randn(rng, 2, 64, dtype=torch.float32), poison(2, 64), poison(2, 64)],
        reference=_split,
        covers=("cluster_arrive", "cluster_wait"),
        atol=1e-5,
        **_LIMITS,
    ),
)
