# SPDX-License-Identifier: MIT
"""Features of Blackwell: rows gathered and scattered by one bulk copy, scaled GEMMs, floats of four bits."""

import torch

from .base import PlainKernel, f64, poison, randint, randn

FP4 = "float4_e2m1fn"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign (OCP Microscaling Formats, E2M1)."""


def four_rows(T):
    """Four rows go to four others, through one tile."""

    @T.prim_func
    def main(x: T.Tensor((64, 64), T.float16), rows: T.Tensor((4,), T.int32), out: T.Tensor((64, 64), T.float16)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((4, 64), T.float16)
            full = T.alloc_barrier(1)
            if T.shuffle_elect(128):
                T.mbarrier_expect_tx(full, T.tma_gather4_bytes(64, "float16"))
                T.tma_gather4(x, tile, 0, [rows[0], rows[1], rows[2], rows[3]], barrier=full)
                T.barrier_arrive(full)
            T.mbarrier_wait_parity(full, 0)
            if T.shuffle_elect(128):
                T.tma_scatter4(tile, out, 0, [rows[3], rows[2], rows[1], rows[0]])
                T.tma_store_arrive()
            T.tma_store_wait(0, read=False)

    return main


def scaled_product(T):
    """float8 with a scale for each 32 elements along K; the scales go through shared into tensor memory."""
    m, n, k = 128, 128, 256

    @T.prim_func
    def main(
        A: T.Tensor((m, k), T.float8_e4m3fn),
        B: T.Tensor((n, k), T.float8_e4m3fn),
        a_scales: T.Tensor((k // 128 * m,), T.uint32),
        b_scales: T.Tensor((k // 128 * n,), T.uint32),
        C: T.Tensor((m, n), T.float32),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((m, 128), T.float8_e4m3fn), T.alloc_shared((n, 128), T.float8_e4m3fn)
            sa, sb = T.alloc_shared((m,), T.uint32), T.alloc_shared((n,), T.uint32)
            sa_tmem, sb_tmem = T.alloc_tmem([128, m // 32], T.uint32), T.alloc_tmem([128, n // 32], T.uint32)
            c_tmem = T.alloc_tmem([m, n], T.float32)
            c = T.alloc_fragment((m, n), T.float32)
            done = T.alloc_barrier(1)
            for ko in T.serial(k // 128):
                T.copy(A[0, ko * 128], a)
                T.copy(B[0, ko * 128], b)
                T.copy(a_scales[ko * m], sa)
                T.copy(b_scales[ko * n], sb)
                T.tcgen05_sf_warp_transpose(sa)
                T.tcgen05_sf_warp_transpose(sb)
                T.tcgen05_cp_warpx4(sa, sa_tmem)
                T.tcgen05_cp_warpx4(sb, sb_tmem)
                T.tcgen05_gemm_blockscaled(
                    a, b, c_tmem, sa_tmem, sb_tmem, transpose_B=True, clear_accum=ko == 0, mbar=done,
                    k_start=ko * 128, sf_a_granularity_k=32, sf_b_granularity_k=32,
                )  # fmt: skip
                T.mbarrier_wait_parity(done, ko % 2)
            T.copy(c_tmem, c)
            T.copy(c, C)

    return main


def pairs_halved(T):
    """Floats of four bits, two in a byte, as a parameter and as a result."""

    @T.prim_func
    def main(x: T.Tensor((8, 32), FP4), wide: T.Tensor((8, 32), T.float32), out: T.Tensor((8, 32), FP4)):
        with T.Kernel(2, threads=32) as bx:
            tile = T.alloc_fragment((4, 32), T.float32)
            for i, j in T.Parallel(4, 32):
                tile[i, j] = T.Cast(T.float32, x[bx * 4 + i, j]) * 0.5
            T.copy(tile, wide[bx * 4, 0])
            T.copy(tile, out[bx * 4, 0])

    return main


def pairs_product(T):
    """A GEMM of matrices of such pairs."""
    m, n, k = 32, 32, 64

    @T.prim_func
    def main(A: T.Tensor((m, k), FP4), B: T.Tensor((n, k), FP4), C: T.Tensor((m, n), T.float32)):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((m, k), FP4), T.alloc_shared((n, k), FP4)
            c = T.alloc_fragment((m, n), T.float32)
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    return main


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """The values of pairs, the lower half of each byte first."""
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).reshape(*pairs.shape[:-1], -1).long()
    return torch.tensor(FP4_VALUES)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)


def packed(values: torch.Tensor) -> torch.Tensor:
    """Pairs of the nearest values, of two that are as near the one whose last bit is zero."""
    codes = torch.arange(8)[[0, 2, 4, 6, 1, 3, 5, 7]]  # `min` takes the first: even ones
    nearest = codes[(values.abs()[..., None] - torch.tensor(FP4_VALUES)[codes]).abs().min(-1).indices]
    nibbles = (nearest + 8 * torch.signbit(values)).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def _pairs(rng, *shape):
    return randint(rng, 0, 256, *shape, dtype=torch.uint8)


def _scaled_inputs(rng):
    """Elements, and exponents of scales: four to a word, all rows of the first four before those of the next."""
    elements = [randn(rng, 128, 256, dtype=torch.float8_e4m3fn) for _ in range(2)]
    exponents = [randint(rng, 124, 131, 2, 128, 4, dtype=torch.uint8) for _ in range(2)]
    return [*elements, *(e.view(torch.int32).view(torch.uint32).reshape(-1) for e in exponents), poison(128, 128)]


def _scaled(elements, words):
    exponents = words.view(torch.uint8).reshape(2, 128, 4).transpose(0, 1).reshape(128, 8)
    return f64(elements) * (f64(exponents) - 127).exp2().repeat_interleave(32, dim=1)


def _moved(args):
    out, rows = f64(args[2]).clone(), args[1].long()
    out[rows.flip(0)] = f64(args[0])[rows]
    return {2: out}


_ONLY = {
    "targets": ("sm_100a",),
    "why_not": {"sm_80": "not before Blackwell", "sm_90a": "not before Blackwell"},
}

KERNELS = (
    PlainKernel(
        name="four_rows",
        build=four_rows,
        inputs=lambda rng: [
            randn(rng, 64, 64),
            torch.tensor([7, 2, 40, 11], dtype=torch.int32),
            torch.zeros(64, 64, dtype=torch.float16),
        ],
        reference=_moved,
        covers=("tma_gather4", "tma_scatter4"),
        rtol=0.0,
        atol=0.0,
        **_ONLY,
    ),
    PlainKernel(
        name="scaled_product",
        build=scaled_product,
        inputs=_scaled_inputs,
        reference=lambda args: {4: _scaled(args[0], args[2]) @ _scaled(args[1], args[3]).T},
        covers=("tcgen05_gemm_blockscaled", "tcgen05_cp_warpx4", "tcgen05_sf_warp_transpose"),
        rtol=1e-4,
        atol=1e-3,
        **_ONLY,
    ),
    PlainKernel(
        name="pairs_halved",
        build=pairs_halved,
        inputs=lambda rng: [_pairs(rng, 8, 16), poison(8, 32), _pairs(rng, 8, 16)],
        reference=lambda args: {1: f64(unpacked(args[0])) / 2, 2: packed(unpacked(args[0]) / 2).long()},
        covers=(FP4,),
        rtol=0.0,
        atol=0.0,
        **_ONLY,
    ),
    PlainKernel(
        name="pairs_product",
        build=pairs_product,
        inputs=lambda rng: [_pairs(rng, 32, 32), _pairs(rng, 32, 32), poison(32, 32)],
        reference=lambda args: {2: f64(unpacked(args[0]) @ unpacked(args[1]).T)},
        covers=(FP4, "gemm"),
        rtol=0.0,
        atol=0.0,
        **_ONLY,
    ),
)
