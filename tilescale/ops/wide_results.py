# SPDX-License-Identifier: MIT
"""GEMMs of float8 matrices with a collective, whose results are not bfloat16. PyTorch multiplies, and nothing overlaps.

GEMMs leave the tensor cores in float32, where scales and bias are applied; then they are rounded once.
"""

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.all_gather import all_gather
from tilescale.ops.arguments import dense
from tilescale.ops.group import size_of
from tilescale.ops.reduce_scatter import reduce_scatter

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of results."""

MULTIPLE = 16
"""Of both sides of a right matrix, as PyTorch's GEMM requires."""


def gathered_results(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    scale: torch.Tensor,
    of_bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    dtypes: list[torch.dtype],
    group: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered rows of a, and their GEMMs; the scale is that of the tensor, or of each local row."""
    for b in bs:
        _check(a, b, scale)
    rows = all_gather(dense(a), group=group)
    of_rows = all_gather(dense(scale), group=group) if scale.numel() > 1 else scale
    return rows, [_product(rows, *given, of_rows) for given in zip(bs, of_bs, biases, dtypes, strict=True)]


def scattered_result(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    of_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    op: str,
    group: str,
) -> torch.Tensor:
    """This rank's rows of the ranks' GEMMs, summed or averaged; the bias is added on every rank."""
    _check(a, b, scale)
    made = reduce_scatter(_product(a, b, of_b, bias, dtype, scale), group=group)
    return made / size_of(group) if op == "avg" else made


def _check(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises ArgumentError, before any communication, for what PyTorch's GEMM does not support."""
    if b.ndim != 2 or b.shape[0] != a.shape[1] or any(n % MULTIPLE for n in b.shape):
        raise ArgumentError(f"B has shape {tuple(b.shape)}", hint=f"({a.shape[1]}, N), multiples of {MULTIPLE}")
    if scale.numel() not in (1, len(a)):
        raise ArgumentError(f"A_scale has {scale.numel()} numbers", hint=f"1, or {len(a)}")


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    of_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    of_a: torch.Tensor,
) -> torch.Tensor:
    one = of_a.new_ones(())
    made = torch._scaled_mm(dense(a), b, one, one, out_dtype=torch.float32)
    made.mul_(of_a.reshape(-1, 1)).mul_(of_b.reshape(1, -1))
    return (made if bias is None else made.add_(bias)).to(dtype)
