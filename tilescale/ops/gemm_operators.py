# SPDX-License-Identifier: MIT
"""Common parts of GEMMs with a collective: operators with sums over the ranks, and the arguments of kernels."""

from collections.abc import Callable
from typing import Any

import torch

from tilescale.ops.arguments import dense, has_blocks, operand, result_type, unread
from tilescale.ops.block_gemm import scales_of_columns, scales_of_shards
from tilescale.ops.float8 import of_any_size
from tilescale.ops.layout import dtype_of
from tilescale.ops.operator import Operator, operator
from tilescale.ops.unfused import Scales


def summing_operators(
    name: str, summed: Callable[..., torch.Tensor], rows: Callable[[torch.Tensor, str], int]
) -> tuple[Operator, Operator]:
    """The operator `name`, and the one of float8 matrices with a scale for each row of a and each column of b.

    Args:
        summed: the sum of matrices, as `of_any_size` calls it.
        rows: of the result, from a and the group.
    """

    @operator(name)
    def plain(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str, float8: str) -> torch.Tensor:
        return of_any_size(summed, a, b, bias, None, group, float8)

    @operator(f"{name}_scaled")
    def scaled(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, of_a: torch.Tensor, of_b: torch.Tensor, group: str
    ) -> torch.Tensor:
        return of_any_size(summed, a, b, bias, (of_a, of_b), group)

    plain.register_fake(lambda a, b, bias, group, float8: a.new_empty(rows(a, group), b.shape[1]))
    scaled.register_fake(
        lambda a, b, bias, of_a, of_b, group: a.new_empty(rows(a, group), b.shape[1], dtype=result_type(a))
    )
    return plain, scaled


def kernel_arguments(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales, shards: int
) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """The arguments of a choice of kernels but for the rows, and the kernel's first arguments: a as `shards` matrices,
    b, the bias and the scales."""
    right, transposed = operand(b)
    of_b, of_a = unread(a.dtype, a.device)
    if scales is not None:
        of_a, of_b = scales_of_shards(scales[0], shards), scales_of_columns(scales[1])
    added = unread(result_type(a), a.device)[0] if bias is None else dense(bias)
    how = b.shape[1], a.shape[1], (dtype_of(a), dtype_of(b)), transposed, bias is not None, has_blocks(scales)
    return how, (dense(a).view(shards, len(a) // shards, a.shape[1]), right, added, of_a, of_b)
