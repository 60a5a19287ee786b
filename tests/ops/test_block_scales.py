# SPDX-License-Identifier: MIT
"""GEMMs with block scales: programs, emulated with all checks in memory full of NaN, and the operators of a rank."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from typing import Any

import pytest
import torch

import tilescale
from tests.cuda.support import ptxas, source
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops.block_gemm import block_tiling, scales_of_columns, scales_of_shards
from tilescale.ops.gemm_tiles import CHUNK, GemmSpec

F8, E5 = torch.float8_e4m3fn, torch.float8_e5m2


class Blocks:
    """A float8 matrix (rows, columns) with scales of blocks that have `high` rows."""

    def __init__(self, rows: int, columns: int, high: int, kind: torch.dtype = F8):
        self.numbers = torch.randn(rows, columns).to(kind)
        self.scales = torch.rand(-(-rows // high), -(-columns // 128)) + 0.5
        wide = self.scales.repeat_interleave(high, 0).repeat_interleave(128, 1)[:rows, :columns]
        self.whole = self.numbers.double() * wide.double()


def unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan).to(dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for roundings of parts and of the result."""
    assert got.shape == want.shape
    bound = 2.0**-6 * want.abs() + 2.0**-5 * want.abs().mean()
    assert bool(((got.double() - want).abs() <= bound).all()), float((got.double() - want).abs().max())


def module(name: str) -> Any:
    return import_module(f"tilescale.ops.{name}")


@pytest.mark.parametrize(
    ("size", "rows", "n", "k", "gated", "kind"),
    [(1, 3, 144, 272, False, F8), (2, 130, 272, 144, True, E5), (3, CHUNK * 2 + 3, 16, 16, False, F8)],
)
def test_a_gather_with_block_scales(size: int, rows: int, n: int, k: int, gated: bool, kind: torch.dtype):
    a, both = Blocks(size * rows, k, 1, kind), [[Blocks(n, k, 128) for _ in range(1 + gated)] for _ in range(size)]
    tiles = block_tiling(rows, gated)
    of = GemmSpec(n, k, str(kind)[6:], tiles, True, True, "silu" if gated else "", gated, "float8_e4m3fn", True)
    bias, of_a, per_device = torch.randn((1 + gated) * n).bfloat16(), scales_of_shards(a.scales, size), []
    for r, weights in enumerate(both):
        own = [a.numbers.view(size, rows, k)[r : r + 1], weights[0].numbers, weights[-1].numbers, bias, of_a[r : r + 1]]
        room = [unwritten(size, rows, k, dtype=kind), unwritten(*of_a.shape).float()]
        of_b = scales_of_columns(torch.cat([w.scales for w in weights]))
        per_device.append([*own, of_b, unwritten(size, rows, n), *room])
    tilescale.emulate(module("ag_gemm").program(size, of), per_device)
    for weights, (*_, c, _, _) in zip(both, per_device, strict=True):
        want = a.whole @ torch.cat([w.whole for w in weights]).t() + bias.double()
        gate, up = want.chunk(2, 1) if gated else (want, None)
        near(c.view(-1, n), gate if up is None else torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("size", "rows", "blocks"), [(2, CHUNK + 70, 0), (3, 70, 2), (4, 5, 0)])
def test_sums_with_block_scales(size: int, rows: int, blocks: int):
    """Sums that are scattered, and sums on all ranks by a block for each tile or a persistent grid."""
    n, k = 144, 272
    a, b = [Blocks(size * rows, k, 1) for _ in range(size)], [Blocks(n, k, 128) for _ in range(size)]
    of = GemmSpec(n, k, "float8_e4m3fn", block_tiling(rows), True, True, other="float8_e4m3fn", blocks=True)
    bias, shape = torch.randn(n).bfloat16(), (size, rows, n)
    want = sum(x.whole @ y.whole.t() for x, y in zip(a, b, strict=True)) + bias.double()
    per_device = [
        [x.numbers.view(size, rows, k), y.numbers, bias, scales_of_shards(x.scales, size), scales_of_columns(y.scales)]
        + [unwritten(*s) for s in ((1, rows, n), shape, shape)]
        for x, y in zip(a, b, strict=True)
    ]
    tilescale.emulate(module("gemm_rs").program(size, of), per_device)
    for r, (*_, c, _, _) in enumerate(per_device):
        near(c[0], want.view(shape)[r])
    per_device = [
        [
            x.numbers[None],
            y.numbers,
            bias,
            scales_of_shards(x.scales, 1),
            scales_of_columns(y.scales),
            unwritten(size * rows, n),
        ]
        for x, y in zip(a, b, strict=True)
    ]
    tilescale.emulate(module("gemm_ar").program(size, of, blocks), per_device)
    for *_, c in per_device:
        near(c, want)


@pytest.mark.parametrize(("m", "n", "k"), [(5, 24, 40), (130, 300, 200), (0, 16, 128)])
def test_operators_take_block_scales(m: int, n: int, k: int):
    """Of N and K of any number, with several weights, and as `torch.nn.functional.scaled_mm` lays them out."""
    a, b, c = Blocks(m, k, 1), Blocks(n, k, 128), Blocks(128, k, 128)
    bias = torch.randn(n).bfloat16()
    pair, weight = (a.scales, b.scales.t()), b.numbers.t()
    both = ops.all_gather_matmul(a.numbers, [weight, c.numbers.t()], scales=(a.scales, [b.scales.t(), c.scales.t()]))
    for got, one in zip(both, (b, c), strict=True):
        near(got, a.whole @ one.whole.t())
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        near(operator(a.numbers, weight, bias=bias, scales=pair), a.whole @ b.whole.t() + bias.double())


def test_a_gemm_that_is_not_overlapped():
    a, b, bias = Blocks(5, 200, 1, E5), Blocks(48, 200, 128), torch.randn(48).bfloat16()
    got = module("block_gemm").scaled_gemm(a.numbers, b.numbers.t(), bias, a.scales, b.scales)
    near(got, a.whole @ b.whole.t() + bias.double())


@pytest.mark.parametrize(
    ("of_a", "of_b", "message"),
    [
        (torch.ones(3, 3), torch.ones(2, 2), r"scales\[1\] has 4 numbers"),
        (torch.ones(3, 2), torch.ones(2, 3), r"scales\[1\] has 6 numbers"),
        (torch.ones(3, 2), torch.ones(2, 2).bfloat16(), r"scales\[1\] is torch.bfloat16"),
    ],
)
def test_block_scales_of_other_shapes_are_named(of_a: torch.Tensor, of_b: torch.Tensor, message: str):
    with pytest.raises(ArgumentError, match=message):
        ops.matmul_all_reduce(torch.zeros(3, 256).to(F8), torch.zeros(256, 256).to(F8).t(), scales=(of_a, of_b))


@pytest.mark.parametrize("gradients", [E5, F8, torch.bfloat16])
def test_training_with_block_scales(gradients: torch.dtype):
    """Results are those of quantized matrices in float64; gradients of the quantized gradient, or of it as it is."""
    x, w, grad = (torch.randn(shape).bfloat16() for shape in ((130, 200), (72, 200), (130, 72)))
    x[:, :128] *= 2**-9
    recipe = ops.Float8("blockwise", gradients)
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = operator(leaves[0], leaves[1].t(), float8=recipe)
        of_x, of_w = torch.autograd.grad(y, leaves, grad)
        near(y.detach(), rounded(x, 1) @ rounded(w, 128).t())
        is_plain = gradients == torch.bfloat16
        near(of_x, grad.double() @ w.double() if is_plain else rounded(grad, 1, gradients) @ rounded(w, 128))
        near(of_w, grad.double().t() @ x.double())


def rounded(x: torch.Tensor, high: int, kind: torch.dtype = F8) -> torch.Tensor:
    """A matrix in float64 with blocks rounded to float8, by the power of two that makes them fit."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.double(), (0, -columns % 128, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, high))
    exponent = torch.frexp(blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / torch.finfo(kind).max).exponent
    scale = torch.ldexp(torch.ones_like(blocks[:, :1, :, :1]), exponent)
    return ((blocks / scale).to(kind).double() * scale).flatten(2).flatten(0, 1)[:rows, :columns]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_sums_of_a_step_are_in_registers():
    of = GemmSpec(2048, 7168, "float8_e4m3fn", block_tiling(4096), True, False, blocks=True)
    said = ptxas(source(module("ag_gemm").program(2, of)))
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
