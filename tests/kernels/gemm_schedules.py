# SPDX-License-Identifier: MIT
"""GEMMs whose tiles are distributed unevenly: split and stream K, persistent blocks, groups, sparse blocks."""

import torch

from .base import PlainKernel, f64, poison, randint, randn

M, N, K = 128, 128, 128
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32


def split_k(T):
    """Blocks along K add their partial tiles into C, which holds the bias they start from."""
    splits = 2

    @T.prim_func
    def main(A: T.Tensor((M, K), T.float16), B: T.Tensor((K, N), T.float16), C: T.Tensor((M, N), T.float32)):
        with T.Kernel(N // BLOCK_N, M // BLOCK_M, splits, threads=128) as (bx, by, bz):
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.float16)
            b_tile = T.alloc_shared((BLOCK_K, BLOCK_N), T.float16)
            staged = T.alloc_shared((BLOCK_M, BLOCK_N), T.float32)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            T.clear(acc)
            for ko in T.Pipelined(K // splits // BLOCK_K, num_stages=2):
                T.copy(A[by * BLOCK_M, bz * (K // splits) + ko * BLOCK_K], a_tile)
                T.copy(B[bz * (K // splits) + ko * BLOCK_K, bx * BLOCK_N], b_tile)
                T.gemm(a_tile, b_tile, acc)
            T.copy(acc, staged)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                T.atomic_add(C[by * BLOCK_M + i, bx * BLOCK_N + j], staged[i, j])

    return main


def persistent(T):
    """Three resident blocks walk over four tiles with the persistent loop construct."""
    blocks = 3

    @T.prim_func
    def main(A: T.Tensor((M, K), T.float16), B: T.Tensor((K, N), T.float16), C: T.Tensor((M, N), T.float32)):
        with T.Kernel(blocks, threads=128) as worker:
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.float16)
            b_tile = T.alloc_shared((BLOCK_K, BLOCK_N), T.float16)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            for by, bx in T.Persistent([M // BLOCK_M, N // BLOCK_N], blocks, worker):
                T.clear(acc)
                for ko in T.Pipelined(K // BLOCK_K, num_stages=2):
                    T.copy(A[by * BLOCK_M, ko * BLOCK_K], a_tile)
                    T.copy(B[ko * BLOCK_K, bx * BLOCK_N], b_tile)
                    T.gemm(a_tile, b_tile, acc)
                T.copy(acc, C[by * BLOCK_M, bx * BLOCK_N])

    return main


def persistent_loop(T):
    """A persistent GEMM written by hand: a strided loop over tile numbers with a guard for the last wave."""
    blocks, tiles_m, tiles_n = 3, M // BLOCK_M, N // BLOCK_N

    @T.prim_func
    def main(A: T.Tensor((M, K), T.bfloat16), B: T.Tensor((K, N), T.bfloat16), C: T.Tensor((M, N), T.bfloat16)):
        with T.Kernel(blocks, threads=128) as worker:
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.bfloat16)
            b_tile = T.alloc_shared((BLOCK_K, BLOCK_N), T.bfloat16)
            staged = T.alloc_shared((BLOCK_M, BLOCK_N), T.bfloat16)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            for wave in T.serial(T.ceildiv(tiles_m * tiles_n, blocks)):
                tile = wave * blocks + worker
                if tile < tiles_m * tiles_n:
                    T.clear(acc)
                    for ko in T.Pipelined(K // BLOCK_K, num_stages=2):
                        T.copy(A[tile // tiles_n * BLOCK_M, ko * BLOCK_K], a_tile)
                        T.copy(B[ko * BLOCK_K, tile % tiles_n * BLOCK_N], b_tile)
                        T.gemm(a_tile, b_tile, acc)
                    T.copy(acc, staged)
                    T.copy(staged, C[tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N])

    return main


def scheduler_loop(T):
    """The tile scheduler object in a while loop, column first, with panels of two."""
    blocks = 2

    @T.prim_func
    def main(A: T.Tensor((M, K), T.float16), B: T.Tensor((K, N), T.float16), C: T.Tensor((M, N), T.float32)):
        with T.Kernel(blocks, threads=128) as worker:
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.float16)
            b_tile = T.alloc_shared((BLOCK_K, BLOCK_N), T.float16)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            tiles = T.PersistentTileScheduler(M // BLOCK_M, N // BLOCK_N, num_workers=blocks, swizzle_size=2)
            tiles.init(worker)
            while tiles.valid():
                T.clear(acc)
                for ko in T.serial(K // BLOCK_K):
                    T.copy(A[tiles.m_idx * BLOCK_M, ko * BLOCK_K], a_tile)
                    T.copy(B[ko * BLOCK_K, tiles.n_idx * BLOCK_N], b_tile)
                    T.gemm(a_tile, b_tile, acc)
                T.copy(acc, C[tiles.m_idx * BLOCK_M, tiles.n_idx * BLOCK_N])
                tiles.next_tile()

    return main


def stream_k(T):
    """Each worker takes an equal share of all (tile, K step) pairs; tiles that are shared are summed atomically."""
    workers, steps, tiles_m, tiles_n = 3, K // BLOCK_K, M // BLOCK_M, N // BLOCK_N
    total = steps * tiles_m * tiles_n
    share = -(-total // workers)

    @T.prim_func
    def main(A: T.Tensor((M, K), T.float16), B: T.Tensor((K, N), T.float16), C: T.Tensor((M, N), T.float32)):
        with T.Kernel(workers, threads=128) as worker:
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.float16)
            b_tile = T.alloc_shared((BLOCK_K, BLOCK_N), T.float16)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            begin = T.alloc_var(T.int32, init=0)
            end = T.alloc_var(T.int32, init=0)
            begin = worker * share
            while begin < T.min((worker + 1) * share, total):
                tile = begin // steps
                first = begin % steps
                end = T.min(T.min((worker + 1) * share, total), (tile + 1) * steps)
                T.clear(acc)
                for ko in T.serial(end - begin):
                    T.copy(A[tile // tiles_n * BLOCK_M, (first + ko) * BLOCK_K], a_tile)
                    T.copy(B[(first + ko) * BLOCK_K, tile % tiles_n * BLOCK_N], b_tile)
                    T.gemm(a_tile, b_tile, acc)
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    T.atomic_add(C[tile // tiles_n * BLOCK_M + i, tile % tiles_n * BLOCK_N + j], acc[i, j])
                begin = end

    return main


def grouped_gemm(T):
    """Rows sorted by expert, each run of rows multiplied with its expert's weights; runs may be empty or odd."""
    rows, experts, n, k = 150, 3, 64, 64
    most = -(-rows // BLOCK_M)

    @T.prim_func
    def main(
        A: T.Tensor((rows, k), T.float16),
        W: T.Tensor((experts, k, n), T.float16),
        offsets: T.Tensor((experts + 1,), T.int32),
        C: T.Tensor((rows, n), T.float32),
    ):
        with T.Kernel(most, experts, threads=128) as (bx, expert):
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.float16)
            w_tile = T.alloc_shared((BLOCK_K, n), T.float16)
            acc = T.alloc_fragment((BLOCK_M, n), T.float32)
            start = offsets[expert] + bx * BLOCK_M
            stop = offsets[expert + 1]
            if start < stop:
                T.clear(acc)
                for ko in T.Pipelined(k // BLOCK_K, num_stages=1):
                    T.copy(A[start : start + BLOCK_M, ko * BLOCK_K : (ko + 1) * BLOCK_K], a_tile)
                    T.copy(W[expert, ko * BLOCK_K : (ko + 1) * BLOCK_K, :], w_tile)
                    T.gemm(a_tile, w_tile, acc)
                for i, j in T.Parallel(BLOCK_M, n):
                    if start + i < stop:
                        C[start + i, j] = acc[i, j]

    return main


def block_sparse(T):
    """K steps whose block of A is marked absent are skipped."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), T.float16),
        B: T.Tensor((K, N), T.float16),
        present: T.Tensor((M // BLOCK_M, K // BLOCK_K), T.bool),
        C: T.Tensor((M, N), T.float32),
    ):
        with T.Kernel(N // BLOCK_N, M // BLOCK_M, threads=128) as (bx, by):
            a_tile = T.alloc_shared((BLOCK_M, BLOCK_K), T.float16)
            b_tile = T.alloc_shared((BLOCK_K, BLOCK_N), T.float16)
            acc = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            T.clear(acc)
            for ko in T.Pipelined(K // BLOCK_K, num_stages=1):
                if present[by, ko]:
                    T.copy(A[by * BLOCK_M, ko * BLOCK_K], a_tile)
                    T.copy(B[ko * BLOCK_K, bx * BLOCK_N], b_tile)
                    T.gemm(a_tile, b_tile, acc)
            T.copy(acc, C[by * BLOCK_M, bx * BLOCK_N])

    return main


def _product(args):
    return {2: f64(args[0]) @ f64(args[1])}


def _accumulated(args):
    return {2: f64(args[2]) + f64(args[0]) @ f64(args[1])}


def _operands(rng):
    return [randn(rng, M, K), randn(rng, K, N), poison(M, N)]


def _accumulating(rng):
    return [randn(rng, M, K), randn(rng, K, N), randn(rng, M, N, dtype=torch.float32)]


def _grouped_inputs(rng):
    offsets = torch.tensor([0, 67, 67, 150], dtype=torch.int32)
    return [randn(rng, 150, 64), randn(rng, 3, 64, 64), offsets, poison(150, 64)]


def _grouped_reference(args):
    a, weights, bounds = f64(args[0]), f64(args[1]), args[2].tolist()
    runs = zip(bounds, bounds[1:], weights, strict=False)
    return {3: torch.cat([a[low:high] @ weight for low, high, weight in runs])}


def _sparse_inputs(rng):
    present = randint(rng, 0, 2, 2, 4).bool()
    present[0, 0], present[0, 1] = True, False
    return [randn(rng, M, K), randn(rng, K, N), present, poison(M, N)]


def _sparse_reference(args):
    kept = args[2].repeat_interleave(BLOCK_M, 0).repeat_interleave(BLOCK_K, 1)
    return {3: (f64(args[0]) * kept) @ f64(args[1])}


def _bf16_operands(rng):
    return [
        randn(rng, M, K, dtype=torch.bfloat16),
        randn(rng, K, N, dtype=torch.bfloat16),
        poison(M, N, dtype=torch.bfloat16),
    ]


KERNELS = (
    PlainKernel("split_k", split_k, _accumulating, _accumulated, covers=("gemm", "split K", "atomic_add")),
    PlainKernel("persistent", persistent, _operands, _product, covers=("gemm", "Persistent", "pipelined")),
    PlainKernel(
        "persistent_loop",
        persistent_loop,
        _bf16_operands,
        _product,
        covers=("gemm", "persistent loop", "pipelined"),
        rtol=1e-2,
        atol=6e-2,
    ),
    PlainKernel("scheduler_loop", scheduler_loop, _operands, _product, covers=("gemm", "PersistentTileScheduler")),
    PlainKernel("stream_k", stream_k, _accumulating, _accumulated, covers=("gemm", "stream K", "while", "atomic_add")),
    PlainKernel(
        "grouped_gemm", grouped_gemm, _grouped_inputs, _grouped_reference, covers=("gemm", "grouped", "run-time rows")
    ),
    PlainKernel("block_sparse", block_sparse, _sparse_inputs, _sparse_reference, covers=("gemm", "block mask", "bool")),
)
