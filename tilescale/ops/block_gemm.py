# SPDX-License-Identifier: MIT
"""GEMMs of float8 matrices with block scales: one for each 128 numbers of a row of a, and for each 128 x 128 of b.

As `torch.nn.functional.scaled_mm` calls them: BlockWise1x128 and BlockWise128x128; the checkpoints of DeepSeek-V3 have
them (arXiv:2412.19437, section 3.3.2).
"""

import torch

from tilescale.ops.arguments import BLOCK, dense
from tilescale.ops.grouped_float8 import scaled_program
from tilescale.ops.kernels import local_kernel
from tilescale.ops.layout import dtype_of, more_rows
from tilescale.ops.moe_tables import ALIGN
from tilescale.ops.products import COPIES


def scales_of_shards(of_a: torch.Tensor, shards: int) -> torch.Tensor:
    """The scales of the rows of several shards as programs load them: (shards, rows), or of blocks (shards, rows / 128,
    groups, 128), so that those of a tile's rows are one bulk copy."""
    if of_a.ndim == 1:
        return dense(of_a).view(shards, -1)
    rows = len(of_a) // shards
    more = max(-(-rows // BLOCK), 1) * BLOCK - rows
    padded = torch.nn.functional.pad(of_a.view(shards, rows, of_a.shape[1]), (0, 0, 0, more))
    return padded.unflatten(1, (-1, BLOCK)).transpose(2, 3).contiguous()


def scales_of_columns(of_b: torch.Tensor) -> torch.Tensor:
    """The scales of b as programs load them: (columns,), or of blocks (columns / 128, groups, copies)."""
    return of_b if of_b.ndim == 1 else of_b[..., None].expand(*of_b.shape, COPIES).contiguous()


def block_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, of_a: torch.Tensor, of_b: torch.Tensor
) -> torch.Tensor:
    """a @ b + bias on this rank alone: the grouped GEMM of one expert. b is the transpose of a contiguous matrix."""
    (M, K), N = a.shape, b.shape[1]
    rows = -(-M // ALIGN) * ALIGN
    owners, made = of_a.new_zeros(rows // ALIGN, dtype=torch.int32), a.new_empty(rows, N, dtype=torch.bfloat16)
    given = more_rows(dense(a).view(torch.uint8), rows).view(a.dtype), more_rows(of_a, rows).t().contiguous()
    local_kernel(scaled_program, N, K, K, dtype_of(a))(*given, dense(b.t())[None], of_b[None], owners, made)
    return made[:M] if bias is None else made[:M] + bias
