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


def summing_operator(
    name: str, summed: Callable[..., torch.Tensor], rows: Callable[[torch.Tensor, str], int]
) -> Operator:
    """The operator `name`. Float8 matrices have two `scales`, for rows of a and for columns of b; others an empty list.

    Args:
        summed: the sum of matrices, as `of_any_size` calls it.
        rows: of the result, from a and the group.
    """

    @operator(name)
    def made(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: list[torch.Tensor], group: str, float8: str
    ) -> torch.Tensor:
        return of_any_size(summed, a, b, bias, pair_of(scales), group, float8)

    made.register_fake(
        lambda a, b, bias, scales, group, float8: a.new_empty(rows(a, group), b.shape[1], dtype=result_type(a))
    )
    return made


def pair_of(scales: list[torch.Tensor]) -> Scales:
    """The scales of both operands of an operator, None without any."""
    return (scales[0], scales[1]) if scales else None


def check_has_backward(ctx: Any) -> None:
    """Raise RuntimeError for the backward of a GEMM with scales."""
    if ctx.scales:
        raise RuntimeError("a GEMM of float8 matrices with scales has no backward")


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
