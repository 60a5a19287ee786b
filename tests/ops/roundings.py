# SPDX-License-Identifier: MIT
"""Quantization of a matrix to float8 by PyTorch's operations, one after the other; and matrices to quantize."""

from __future__ import annotations

import torch


def by_pytorch(x: torch.Tensor, kind: torch.dtype, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An operation after the other."""
    low, high = torch.aminmax(x, dim=1, keepdim=True) if scaling == "rowwise" else torch.aminmax(x)
    largest = torch.maximum(-low, high).float().clamp(min=1e-12)
    exponent = torch.frexp(largest / torch.finfo(kind).max).exponent
    scale, inverse = (torch.ldexp(largest - largest + 1, e) for e in (exponent, -exponent))  # NaN of what is not finite
    made = (x * inverse.to(x.dtype)).to(kind, memory_format=torch.contiguous_format)
    return made, scale.reshape(-1).expand(len(x)).contiguous()


def same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether both have the same bits, but for those of NaN."""
    return all(x.is_contiguous() and torch.equal(bits(x), bits(y)) for x, y in zip(got, want, strict=True))


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of numbers, -1 for NaN."""
    as_integers = x.view(torch.int32 if x.itemsize == 4 else torch.uint8).int()
    return torch.where(x.float().isnan(), -1, as_integers)


def of_many_magnitudes(rows: int, columns: int) -> torch.Tensor:
    """Rows from where numbers of bfloat16 begin to where they end, and one of zeros."""
    powers = torch.linspace(-140, 126, rows)[torch.randperm(rows)]
    x = torch.randn(rows, columns) * torch.exp2(powers)[:, None] * torch.exp2(-20 * torch.rand(rows, columns))
    x[rows // 2] = 0
    return x.clamp(-3.3e38, 3.3e38).bfloat16()


def as_it_lies(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers: contiguous, as the transpose of a contiguous matrix, or as columns of a wider one."""
    if how == "across":
        return x.t().contiguous().t()
    return torch.cat([x, x], 1)[:, : x.shape[1]] if how == "strided" else x
