# SPDX-License-Identifier: MIT
"""The sum of all ranks with residual and RMSNorm: its programs, emulated."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import tilescale
from tests.packed_scales import unpacked
from tilescale.errors import ShapeError
from tilescale.program.norm import GROUP, packed_words

EPS = 1e-5
norm = import_module("tilescale.ops.all_reduce_rms_norm")
layer = import_module("tilescale.ops.all_reduce_layer_norm")
float8 = import_module("tilescale.ops.all_reduce_rms_norm_float8")


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
    per_device = [[part.clone(), torch.full_like(part, torch.nan), *end] for part, end in zip(x, ends, strict=True)]
    tilescale.emulate(norm.program(size, N, name, has_residual, EPS, None), per_device)
    for part, (given, *_) in zip(x, per_device, strict=True):
        assert torch.equal(given, part), "what a rank gives stays"
    check_results(per_device, want, eps)
    if size > 1:
        for algorithm in ("one_shot", "two_shot"):
            ends = [[added, weight, nothing(M, N, dtype=dtype), nothing(M, N, dtype=dtype)] for _ in x]
            per_device = [[part, *end] for part, end in zip(x, ends, strict=True)]
            tilescale.emulate(norm.by_one_kernel(size, N, name, has_residual, EPS, algorithm), per_device)
            check_results(per_device, want, eps)


@pytest.mark.parametrize(
    ("size", "M", "N", "dtype", "has_bias", "has_residual"),
    [(2, 5, 72, torch.bfloat16, True, True), (3, 4, 200, torch.float16, False, False)],
)
def test_layer_norm(size: int, M: int, N: int, dtype: torch.dtype, has_bias: bool, has_residual: bool):
    """Rows whose mean is much larger than their deviation: the mean of squares minus a square would lose it."""
    x, weight = [(torch.randn(M, N) + 40).to(dtype) for _ in range(size)], torch.randn(N).to(dtype)
    bias, residual = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
    y = reference(x, residual if has_residual else None, weight)[1]
    want = torch.nn.functional.layer_norm(
        y.double(), (N,), weight.double(), bias.double() if has_bias else None, EPS
    ).float()
    given = residual if has_residual else nothing(1, 1, dtype=dtype), bias if has_bias else nothing(1, dtype=dtype)
    name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
    for algorithm in ("one_shot", "two_shot"):
        ends = [[nothing(M, N, dtype=dtype), nothing(M, N, dtype=dtype)] for _ in x]
        per_device = [[part, given[0], weight, given[1], *end] for part, end in zip(x, ends, strict=True)]
        tilescale.emulate(layer.by_one_kernel(size, N, name, has_bias, has_residual, EPS, algorithm), per_device)
        for *_, normed, got in per_device:
            assert torch.equal(got.float(), y)
            torch.testing.assert_close(normed.float(), want, rtol=eps, atol=eps)


def check_results(per_device: list[list[torch.Tensor]], want: list[torch.Tensor], eps: float) -> None:
    """The last two tensors of each device."""
    for *_, normed, y in per_device:
        for got, right in zip((normed, y), want, strict=True):
            # A sum that falls to the other side of a rounding is off by one, before and after the residual.
            torch.testing.assert_close(got.float(), right, rtol=3 * eps, atol=8 * eps)
    assert all(torch.equal(tensors[-2], per_device[0][-2]) for tensors in per_device)


@pytest.mark.parametrize("return_normed", [True, False])
@pytest.mark.parametrize("scaling", ["tensor", "row", "group", "packed"])
@pytest.mark.parametrize(
    ("size", "M", "N", "dtype", "has_residual", "algorithm"),
    [
        (2, 5, 200, torch.bfloat16, True, "one_shot"),
        (3, 4, 72, torch.float16, False, "two_shot"),
        (8, 3, 1032, torch.bfloat16, True, "two_shot"),
    ],
)
def test_quantized_rows(
    size: int,
    M: int,
    N: int,
    dtype: torch.dtype,
    has_residual: bool,
    algorithm: str,
    scaling: str,
    return_normed: bool,
):
    x, weight = [torch.randn(M, N).to(dtype) for _ in range(size)], torch.randn(N).to(dtype)
    residual, power, offset = torch.randn(M, N).to(dtype), not return_normed, 1.0
    added = residual if has_residual else nothing(1, 1, dtype=dtype)
    for part in (*x, residual):
        part[1] = 0
    given = torch.tensor([0.03]) if scaling == "tensor" else None
    shapes = {"tensor": (1,), "row": (M,), "group": (M, -(-N // GROUP)), "packed": (packed_words(M, N),)}
    kind, groups, scale_type = norm.dtype_of(weight), shapes[scaling], torch.float32
    if scaling == "packed":
        power, scale_type = True, torch.int32
    made = float8.by_one_kernel(
        size, N, kind, has_residual, EPS, algorithm, offset, scaling, power and given is None, return_normed
    )
    per_device = []
    for part in x:
        rows = nothing(*((M, N) if return_normed else (1, 1)), dtype=dtype)
        q = torch.full((M, N), 7.0).to(torch.float8_e4m3fn)
        scales = nothing(*groups, dtype=torch.float32).to(scale_type) if given is None else given.clone()
        per_device.append([part, added, weight, rows, nothing(M, N, dtype=dtype), q, scales])
    tilescale.emulate(made, per_device)
    for *_, rows, y, q, scales in per_device:
        exact = y.double() * (y.double().pow(2).mean(1, keepdim=True) + EPS).rsqrt() * (weight.double() + offset)
        check_quantized(exact, q, scales, scaling, power and given is None)
        if return_normed:
            torch.testing.assert_close(rows.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
        else:
            assert rows.isnan().all(), "nobody writes what is not asked for"
        assert torch.equal(q.view(torch.uint8), per_device[0][-2].view(torch.uint8))


def check_quantized(exact: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, scaling: str, power: bool) -> None:
    """Float8 numbers are the nearest ones, over the scales that the largest magnitudes have."""
    M, N = exact.shape
    if scaling == "packed":
        scales, scaling, power = unpacked(scales, M, N), "group", True
    wide = {"tensor": N, "row": N, "group": GROUP}[scaling]
    factors = scales.double().view(-1, 1) if scaling != "group" else scales.double().repeat_interleave(wide, 1)[:, :N]
    if scaling != "tensor":
        largest = torch.stack([group.abs().amax(1) for group in exact.split(wide, 1)], 1).clamp(min=1e-12) / 448
        want = largest.log2().ceil().exp2() if power else largest
        torch.testing.assert_close(scales.double().view(M, -1), want, rtol=1e-5, atol=0)
    error = (q.double() * factors - exact).abs()
    assert (error <= 2**-4 * 1.01 * exact.abs() + 2.0**-10 * factors).all()


@pytest.mark.parametrize("words", [12, 14])
def test_another_number_of_packed_words(words: int):
    """Five rows of two words have thirteen."""
    made = float8.by_one_kernel(2, 640, "bfloat16", False, EPS, "one_shot", 0.0, "packed", False, False)
    none, rows = nothing(1, 1, dtype=torch.bfloat16), nothing(5, 640, dtype=torch.bfloat16)
    q, scales = rows.to(torch.float8_e4m3fn), torch.zeros(words, dtype=torch.int32)
    per_device = [[rows, none, rows[0], none, rows.clone(), q.clone(), scales.clone()] for _ in range(2)]
    with pytest.raises(ShapeError, match=f"scales has {words} words") as raised:
        tilescale.emulate(made, per_device)
    assert "5 rows of 640 have 13" in str(raised.value)


@pytest.mark.parametrize(
    ("N", "scaling"), [(200, "row"), (200, "group"), (256, "group"), (200, "tensor"), (200, "packed"), (640, "packed")]
)
def test_rows_that_are_there_are_quantized_alike(N: int, scaling: str):
    """PyTorch's operations quantize rows that no kernel normalises."""
    rows = torch.randn(5, N).bfloat16()
    rows[1] = 0
    given = torch.tensor([0.03]) if scaling == "tensor" else None
    for power in (False, True):
        q, scales = float8._quantized(rows, scaling, power, given)
        assert q.shape == rows.shape and q.is_contiguous()
        check_quantized(rows.double(), q, scales if given is None else given, scaling, power)


def test_a_weight_with_an_offset():
    """Gemma's: two kernels, and one."""
    x, weight, residual = [torch.randn(4, 72) for _ in range(2)], torch.randn(72), torch.randn(4, 72)
    want = reference(x, residual, weight + 1)
    for made, before in (
        (
            norm.program(2, 72, "float32", True, EPS, "one_shot", 1.0),
            lambda part: [part, torch.full_like(part, torch.nan)],
        ),
        (norm.by_one_kernel(2, 72, "float32", True, EPS, "one_shot", 1.0), lambda part: [part]),
    ):
        ends = [[residual, weight, *(nothing(4, 72, dtype=torch.float32) for _ in range(2))] for _ in x]
        per_device = [[*before(part), *end] for part, end in zip(x, ends, strict=True)]
        tilescale.emulate(made, per_device)
        check_results(per_device, want, 1e-6)


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
