# SPDX-License-Identifier: MIT
"""GEMMs with operands other than plain matrices: packed int4, 2:4 sparse, two weights for a gated unit."""

import torch

from .base import PlainKernel, f64, poison, randint, randn


def int4_weights(T):
    """Weights of 4 bits, two in a byte, unpacked and scaled by each thread in its own registers."""
    m, n, k, block_k, threads = 64, 64, 128, 64, 128
    lanes = n * (block_k // 2) // threads

    @T.prim_func
    def main(
        A: T.Tensor((m, k), T.float16),
        packed: T.Tensor((n, k // 2), T.uint8),
        scale: T.Tensor((n,), T.float16),
        C: T.Tensor((m, n), T.float32),
    ):
        with T.Kernel(1, threads=threads):
            a_tile = T.alloc_shared((m, block_k), T.float16)
            packed_tile = T.alloc_shared((n, block_k // 2), T.uint8)
            b_tile = T.alloc_shared((n, block_k), T.float16)
            packed_regs = T.alloc_local((lanes,), T.uint8)
            b_regs = T.alloc_local((2 * lanes,), T.float16)
            acc = T.alloc_fragment((m, n), T.float32)
            tx = T.get_thread_binding()
            row = tx // 2
            first = tx % 2 * lanes
            T.clear(acc)
            for ko in T.serial(k // block_k):
                T.copy(A[0, ko * block_k], a_tile)
                T.copy(packed[0, ko * (block_k // 2)], packed_tile)
                for v in T.vectorized(lanes):
                    packed_regs[v] = packed_tile[row, first + v]
                for v in T.serial(2 * lanes):
                    nibble = T.shift_right(packed_regs[v // 2], T.cast(v % 2 * 4, T.uint8)) & T.uint8(15)
                    b_regs[v] = (T.cast(nibble, T.float16) - T.float16(8)) * scale[row]
                for v in T.vectorized(2 * lanes):
                    b_tile[row, 2 * first + v] = b_regs[v]
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def int4_parallel(T):
    """The same weights unpacked by an element-wise loop from registers to registers, as operands of the GEMM."""
    m, n, k, block_k = 64, 64, 64, 32

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), packed: T.Tensor((n, k // 2), T.uint8), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=128):
            a_tile = T.alloc_shared((m, block_k), T.float16)
            packed_tile = T.alloc_shared((n, block_k // 2), T.uint8)
            b_tile = T.alloc_shared((n, block_k), T.float16)
            acc = T.alloc_fragment((m, n), T.float32)
            T.clear(acc)
            for ko in T.Pipelined(k // block_k, num_stages=1):
                T.copy(A[0, ko * block_k], a_tile)
                T.copy(packed[0, ko * (block_k // 2)], packed_tile)
                for i, j in T.Parallel(n, block_k):
                    byte = T.cast(packed_tile[i, j // 2], T.int32)
                    b_tile[i, j] = T.cast(((byte >> (j % 2 * 4)) & 15) - 8, T.float16)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def sparse_gemm(T):
    """A keeps two of every four values along K, with 2-bit positions packed into 16-bit words."""
    m, n, k, block_k = 64, 64, 128, 64

    @T.prim_func
    def main(
        A: T.Tensor((m, k // 2), T.float16),
        E: T.Tensor((m, k // 16), T.int16),
        B: T.Tensor((k, n), T.float16),
        C: T.Tensor((m, n), T.float32),
    ):
        with T.Kernel(1, threads=128):
            a_tile = T.alloc_shared((m, block_k // 2), T.float16)
            e_tile = T.alloc_shared((m, block_k // 16), T.int16)
            b_tile = T.alloc_shared((block_k, n), T.float16)
            acc = T.alloc_fragment((m, n), T.float32)
            T.clear(acc)
            for ko in T.Pipelined(k // block_k, num_stages=1):
                T.copy(A[0, ko * (block_k // 2)], a_tile)
                T.copy(E[0, ko * (block_k // 16)], e_tile)
                T.copy(B[ko * block_k, 0], b_tile)
                T.gemm_sp(a_tile, e_tile, b_tile, acc)
            T.copy(acc, C)

    return main


def tensor_memory_gemm(T):
    """The accumulator is in tensor memory; each GEMM signals a barrier that the block waits for."""
    m, n, k, block_k = 128, 64, 128, 64

    @T.prim_func
    def main(A: T.Tensor((m, k), T.bfloat16), B: T.Tensor((n, k), T.bfloat16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=128):
            a_tile = T.alloc_shared((m, block_k), T.bfloat16)
            b_tile = T.alloc_shared((n, block_k), T.bfloat16)
            acc = T.alloc_tmem((m, n), T.float32)
            result = T.alloc_fragment((m, n), T.float32)
            done = T.alloc_barrier(1)
            for ko in T.serial(k // block_k):
                T.copy(A[0, ko * block_k], a_tile)
                T.copy(B[0, ko * block_k], b_tile)
                T.tcgen05_gemm(a_tile, b_tile, acc, transpose_B=True, mbar=done, clear_accum=(ko == 0))
                T.mbarrier_wait_parity(done, ko % 2)
            T.copy(acc, result)
            T.copy(result, C)

    return main


def async_wgmma(T):
    """Two warpgroup GEMMs in flight, waited for by hand before their sum is read."""
    m, n, k = 64, 64, 64

    @T.prim_func
    def main(A: T.Tensor((m, k), T.float16), B: T.Tensor((n, k), T.float16), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=128):
            a_tile = T.alloc_shared((m, k), T.float16)
            b_tile = T.alloc_shared((n, k), T.float16)
            first = T.alloc_fragment((m, n), T.float32)
            second = T.alloc_fragment((m, n), T.float32)
            T.copy(A, a_tile)
            T.copy(B, b_tile)
            T.wgmma_gemm(a_tile, b_tile, first, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(a_tile, b_tile, second, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            for i, j in T.Parallel(m, n):
                first[i, j] = first[i, j] + 0.5 * second[i, j]
            T.copy(first, C)

    return main


def gated_unit(T):
    """silu(x @ gate) * (x @ up): one tile of x for two accumulators."""
    m, n, k, block_k = 64, 64, 128, 32

    @T.prim_func
    def main(
        x: T.Tensor((m, k), T.bfloat16),
        gate: T.Tensor((k, n), T.bfloat16),
        up: T.Tensor((k, n), T.bfloat16),
        out: T.Tensor((m, n), T.float32),
    ):
        with T.Kernel(1, threads=128):
            x_tile = T.alloc_shared((m, block_k), T.bfloat16)
            gate_tile = T.alloc_shared((block_k, n), T.bfloat16)
            up_tile = T.alloc_shared((block_k, n), T.bfloat16)
            gate_acc = T.alloc_fragment((m, n), T.float32)
            up_acc = T.alloc_fragment((m, n), T.float32)
            T.clear(gate_acc)
            T.clear(up_acc)
            for ko in T.Pipelined(k // block_k, num_stages=1):
                T.copy(x[0, ko * block_k], x_tile)
                T.copy(gate[ko * block_k, 0], gate_tile)
                T.copy(up[ko * block_k, 0], up_tile)
                T.gemm(x_tile, gate_tile, gate_acc)
                T.gemm(x_tile, up_tile, up_acc)
            for i, j in T.Parallel(m, n):
                up_acc[i, j] = up_acc[i, j] * gate_acc[i, j] / (1.0 + T.exp(-gate_acc[i, j]))
            T.copy(up_acc, out)

    return main


def compress(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and metadata of a 2:4 sparse (rows, k) matrix.

    Each group of four columns keeps two values, in order; its two 2-bit positions form a nibble (first one lowest),
    and four nibbles a 16-bit word (first group lowest), as the sparse tensor-core instructions of PTX read them.
    """
    rows, k = dense.shape
    groups = dense.reshape(rows, k // 4, 4)
    positions = (groups != 0).to(torch.int8).argsort(dim=2, descending=True, stable=True)[..., :2].sort(dim=2).values
    values = groups.gather(2, positions).reshape(rows, k // 2)
    nibbles = (positions[..., 0] | positions[..., 1] << 2).reshape(rows, k // 16, 4)
    words = (nibbles << (4 * torch.arange(4))).sum(2)
    return values, torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)


def expand(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The dense matrix that `compress` was given."""
    rows, half = values.shape
    nibbles = (metadata.long()[..., None] >> (4 * torch.arange(4))).reshape(rows, half // 2) & 15
    positions = torch.stack([nibbles & 3, nibbles >> 2], 2)
    dense = torch.zeros(rows, half // 2, 4, dtype=values.dtype)
    return dense.scatter(2, positions, values.reshape(rows, half // 2, 2)).reshape(rows, 2 * half)


def _unpack(packed):
    return f64(torch.stack([packed & 15, packed >> 4], 2).reshape(packed.shape[0], -1)) - 8


def _int4_inputs(rng):
    packed = randint(rng, 0, 256, 64, 64, dtype=torch.uint8)
    return [randn(rng, 64, 128), packed, randn(rng, 64, scale=0.1), poison(64, 64)]


def _sparse_inputs(rng):
    chosen = torch.rand(64, 32, 4, generator=rng).argsort(dim=2) < 2
    dense = torch.where(chosen.reshape(64, 128), randn(rng, 64, 128).abs() + 0.1, 0)
    return [*compress(dense), randn(rng, 128, 64), poison(64, 64)]


def _gated_inputs(rng):
    operands = [randn(rng, *shape, dtype=torch.bfloat16, scale=0.3) for shape in ((64, 128), (128, 64), (128, 64))]
    return [*operands, poison(64, 64)]


def _gated_reference(args):
    x, gate, up = (f64(arg) for arg in args[:3])
    return {3: torch.nn.functional.silu(x @ gate) * (x @ up)}


KERNELS = (
    PlainKernel(
        name="int4_weights",
        build=int4_weights,
        inputs=_int4_inputs,
        reference=lambda args: {3: f64(args[0]) @ (_unpack(args[1]) * f64(args[2])[:, None]).T},
        covers=("gemm", "int4", "alloc_local", "vectorized", "shift_right"),
        atol=3e-2,
    ),
    PlainKernel(
        name="int4_parallel",
        build=int4_parallel,
        inputs=lambda rng: [randn(rng, 64, 64), randint(rng, 0, 256, 64, 32, dtype=torch.uint8), poison(64, 64)],
        reference=lambda args: {2: f64(args[0]) @ _unpack(args[1]).T},
        covers=("gemm", "int4", "parallel"),
    ),
    PlainKernel(
        name="sparse_gemm",
        build=sparse_gemm,
        inputs=_sparse_inputs,
        reference=lambda args: {3: f64(expand(args[0], args[1])) @ f64(args[2])},
        covers=("gemm_sp",),
    ),
    PlainKernel(
        name="gated_unit",
        build=gated_unit,
        inputs=_gated_inputs,
        reference=_gated_reference,
        covers=("gemm", "two accumulators", "exp"),
        atol=2e-2,
    ),
    PlainKernel(
        name="tensor_memory_gemm",
        build=tensor_memory_gemm,
        inputs=lambda rng: [
            randn(rng, 128, 128, dtype=torch.bfloat16),
            randn(rng, 64, 128, dtype=torch.bfloat16),
            poison(128, 64),
        ],
        reference=lambda args: {2: f64(args[0]) @ f64(args[1]).T},
        covers=("tcgen05_gemm", "alloc_tmem", "alloc_barrier", "mbarrier_wait_parity"),
        targets=("sm_100a",),
        why_not={"sm_80": "no tensor memory", "sm_90a": "no tensor memory"},
    ),
    PlainKernel(
        name="async_wgmma",
        build=async_wgmma,
        inputs=lambda rng: [randn(rng, 64, 64), randn(rng, 64, 64), poison(64, 64)],
        reference=lambda args: {2: 1.5 * f64(args[0]) @ f64(args[1]).T},
        covers=("wgmma_gemm", "wait_wgmma"),
        targets=("sm_90a",),
        why_not={"sm_80": "no warpgroup product", "sm_100a": "no warpgroup product"},
    ),
)
