# SPDX-License-Identifier: MIT
"""The sum of all ranks with residual and RMSNorm: its programs, emulated."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import tilescale

EPS = 1e-5
norm = import_module("tilescale.ops.all_reduce_rms_norm")


def reference(parts: list[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor) -> list[torch.Tensor]:
    """The rows normalised, and before that, rounded after each step."""
    kind = weight.dtype
    y = sum(part.float() for part in parts).to(kind)
    if residual is not None:
        y = (y.float() + residual.float()).to(kind)
    scale = torch.rsqrt(y.float().pow(2).mean(1, keepdim=True) + EPS)
    return [y.float() * scale * weight.float(), y.float()]


def nothing(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize(
    ("size", "M", "N", "dtype", "has_residual"),
    [
        (1, 3, 8, torch.float32, True),
        (3, 70, 72, torch.bfloat16, True),
        (2, 7, 2048, torch.float16, False),
        (8, 9, 1032, torch.float32, True),
    ],
)
def test_sum_residual_and_norm(size: int, M: int, N: int, dtype: torch.dtype, has_residual: bool):
    x, weight = [torch.randn(M, N).to(dtype) for _ in range(size)], torch.randn(N).to(dtype)
    residual = torch.randn(M, N).to(dtype) if has_residual else None
    added = residual if has_residual else nothing(1, 1, dtype=dtype)
    eps = torch.finfo(dtype).eps
    want, name = reference(x, residual, weight), str(dtype).removeprefix("torch.")
    ends = [[added, weight, nothing(M, N, dtype=dtype), nothing(M, N, dtype=dtype)] for _ in x]
    room = min(M, 2)  # more rows than there are
    rows = [torch.cat([part, part[:room]]) for part in x]
    per_device = [[part.clone(), torch.full_like(part, torch.nan), *end] for part, end in zip(rows, ends, strict=True)]
    tilescale.emulate(norm.program(size, M + room, N, name, has_residual, EPS), per_device)
    for part, (given, *_) in zip(rows, per_device, strict=True):
        assert torch.equal(given, part), "what a rank gives stays"
    check_results(per_device, want, eps)
    if size > 1:
        for algorithm in ("one_shot", "two_shot"):
            ends = [[added, weight, nothing(M, N, dtype=dtype), nothing(M, N, dtype=dtype)] for _ in x]
            per_device = [[part, *end] for part, end in zip(x, ends, strict=True)]
            tilescale.emulate(norm.by_one_kernel(size, N, name, has_residual, EPS, algorithm), per_device)
            check_results(per_device, want, eps)


def check_results(per_device: list[list[torch.Tensor]], want: list[torch.Tensor], eps: float) -> None:
    """The last two tensors of each device."""
    for *_, normed, y in per_device:
        for got, right in zip((normed, y), want, strict=True):
            # A sum that falls to the other side of a rounding is off by one, before and after the residual.
            torch.testing.assert_close(got.float(), right, rtol=3 * eps, atol=8 * eps)
    assert all(torch.equal(tensors[-2], per_device[0][-2]) for tensors in per_device)


@pytest.mark.parametrize(
    ("nbytes", "row", "ranks", "algorithm"),
    [
        (12 << 10, 12 << 10, 1, None),
        (12 << 10, 12 << 10, 2, "one_shot"),
        (8 << 20, 12 << 10, 2, "one_shot"),
        (9 << 20, 12 << 10, 2, None),
        (64 << 10, 64 << 10, 2, None),
        (256 << 10, 16 << 10, 4, "one_shot"),
        (512 << 10, 16 << 10, 4, "two_shot"),
        (96 << 10, 16 << 10, 8, "one_shot"),
        (256 << 10, 16 << 10, 8, "two_shot"),
        (4 << 20, 16 << 10, 8, "two_shot"),
        (5 << 20, 16 << 10, 8, None),
    ],
)
def test_few_rows_are_made_by_one_kernel(nbytes: int, row: int, ranks: int, algorithm: str | None):
    """In two steps where that sends much less."""
    with tilescale.use_machine("h100-sxm-8"):
        assert norm._algorithm(nbytes, row, ranks) == algorithm


def test_no_kernel_where_programs_do_not_store_to_peers():
    with tilescale.use_machine("rtx4090-pcie-2"):
        assert norm._algorithm(1 << 10, 1 << 10, 2) is None
