# SPDX-License-Identifier: MIT
"""GEMMs whose operands have a scale for each block along K."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.test_pairs import pairs
from tests.kernels.blackwell import unpacked
from tilescale.errors import UninitializedReadError

M, N, K = 128, 256, 256


def operands(seed: int, rows: int):
    """Elements (rows, K) of float8, and for each 32 of them the exponent of a scale, as one byte."""
    generator = torch.Generator().manual_seed(seed)
    elements = torch.randn(rows, K, generator=generator).to(torch.float8_e4m3fn)
    return elements, torch.randint(124, 131, (rows, K // 32), dtype=torch.uint8, generator=generator)


def packed(scales: torch.Tensor) -> torch.Tensor:
    """Four scales to a word, all rows of the first four before those of the next: (K // 128 * rows,)."""
    return scales.reshape(-1, K // 128, 4).transpose(0, 1).contiguous().view(torch.int32).view(torch.uint32).reshape(-1)


def scaled(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return elements.float() * (scales.float() - 127).exp2().repeat_interleave(32, dim=1)


def product(transposed: bool):
    """As on Blackwell: scales go through shared into tensor memory, and the result comes from there."""

    @T.prim_func
    def program(
        A: T.Tensor((M, K), "float8_e4m3fn"),
        B: T.Tensor((N, K), "float8_e4m3fn"),
        SA: T.Tensor((K // 128 * M,), "uint32"),
        SB: T.Tensor((K // 128 * N,), "uint32"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((M, 128), "float8_e4m3fn")
            b = T.alloc_shared((N, 128), "float8_e4m3fn")
            sa = T.alloc_shared((M,), "uint32")
            sb = T.alloc_shared((N,), "uint32")
            sa_tmem = T.alloc_tmem([128, M // 32], "uint32")
            sb_tmem = T.alloc_tmem([128, N // 32], "uint32")
            c_tmem = T.alloc_tmem([M, N], "float32")
            c = T.alloc_fragment((M, N), "float32")
            done = T.alloc_barrier(1)
            for k in T.serial(K // 128):
                T.copy(A[0, k * 128], a)
                T.copy(B[0, k * 128], b)
                T.copy(SA[k * M], sa)
                T.copy(SB[k * N], sb)
                if transposed:
                    T.tcgen05_sf_warp_transpose(sa)
                    T.tcgen05_sf_warp_transpose(sb)
                T.tcgen05_cp_warpx4(sa, sa_tmem)
                T.tcgen05_cp_warpx4(sb, sb_tmem)
                T.tcgen05_gemm_blockscaled(
                    a, b, c_tmem, sa_tmem, sb_tmem, transpose_B=True, clear_accum=k == 0, mbar=done,
                    k_start=k * 128, sf_a_granularity_k=32, sf_b_granularity_k=32,
                )  # fmt: skip
                T.mbarrier_wait_parity(done, k % 2)
            T.copy(c_tmem, c)
            T.copy(c, C)

    return program


@pytest.mark.parametrize("transposed", [True, False])
def test_scales_go_through_tensor_memory(transposed):
    """They must be transposed before: otherwise, each row is multiplied with another one's scales."""
    (a, sa), (b, sb) = operands(1, M), operands(2, N)
    c = torch.zeros(M, N)
    tilescale.emulate(product(transposed), [a, b, packed(sa), packed(sb), c], machine="b200-sxm-8")
    expected = scaled(a, sa) @ scaled(b, sb).T
    assert torch.allclose(c, expected, rtol=1e-4, atol=1e-3) == transposed


def test_pairs_with_scales_row_by_row():
    """Blocks of 16 with e4m3 scales in shared memory, as consumer Blackwell has them."""

    @T.prim_func
    def program(
        A: T.Tensor((64, 128), "float4_e2m1fn"),
        B: T.Tensor((64, 128), "float4_e2m1fn"),
        SA: T.Tensor((64, 2), "uint32"),
        SB: T.Tensor((64, 2), "uint32"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 128), "float4_e2m1fn")
            b = T.alloc_shared((64, 128), "float4_e2m1fn")
            sa = T.alloc_shared((64, 2), "uint32")
            sb = T.alloc_shared((64, 2), "uint32")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.copy(SA, sa)
            T.copy(SB, sb)
            T.gemm_blockscaled(
                a, b, c, sa, sb, transpose_B=True, clear_accum=True,
                k_start=0, sf_a_granularity_k=16, sf_b_granularity_k=16,
            )  # fmt: skip
            T.copy(c, C)

    a, b = pairs(1, 64, 64), pairs(2, 64, 64)
    scales = [torch.rand(64, 8, generator=torch.Generator().manual_seed(s)).to(torch.float8_e4m3fn) for s in (3, 4)]
    c = torch.zeros(64, 64)
    tilescale.emulate(program, [a, b, *(s.view(torch.uint32) for s in scales), c], machine="rtx4090-pcie-2")
    left, right = (unpacked(x) * s.float().repeat_interleave(16, 1) for x, s in zip((a, b), scales, strict=True))
    torch.testing.assert_close(c, left @ right.T, rtol=1e-4, atol=1e-3)


def test_scales_that_nobody_copied_are_found():
    @T.prim_func
    def program(C: T.Tensor((M, M), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((M, 128), "float8_e4m3fn")
            scales = T.alloc_tmem([128, 4], "uint32")
            c_tmem = T.alloc_tmem([M, M], "float32")
            c = T.alloc_fragment((M, M), "float32")
            T.clear(a)
            T.tcgen05_gemm_blockscaled(
                a, a, c_tmem, scales, scales, transpose_B=True, clear_accum=True,
                k_start=0, sf_a_granularity_k=32, sf_b_granularity_k=32,
            )  # fmt: skip
            T.copy(c_tmem, c)
            T.copy(c, C)

    with pytest.raises(UninitializedReadError, match="scales"):
        tilescale.emulate(program, [torch.zeros(M, M)], machine="b200-sxm-8")
