# SPDX-License-Identifier: MIT
"""GEMMs with a collective before or after them: PyTorch multiplies, a collective moves whole tensors.

Used for GEMMs too small to overlap, and between nodes, where chunks of rows follow one another: see chunks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilescale.comm import Team
from tilescale.ops import whole_tensors
from tilescale.ops.arguments import BLOCK, dense, has_blocks, result_type
from tilescale.ops.block_gemm import scaled_gemm
from tilescale.ops.chunks import chunks, received_first, sent_after

Scales = tuple[torch.Tensor, torch.Tensor] | None
"""Scales of the rows of a, and of the columns of b, where both are float8."""


def gathered_gemms(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    scales: Scales,
    keeps: bool,
    team: Team,
    ending: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Outputs of the rows of all ranks times each weight, followed by the rows if they are to be kept."""
    unit = BLOCK if has_blocks(scales) else 1
    widths = [-(-w.shape[1] // unit) for w in weights]
    columns: Sequence[Any] = [None] * len(weights) if scales is None else scales[1].split(widths)

    def gathered(part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = whole_tensors.gathered(dense(_chunk(a, part)), team)
        return rows, None if scales is None else whole_tensors.gathered(dense(_chunk(scales[0], part)), team)

    def multiplied(brought: tuple[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor]:
        rows, of_rows = brought
        pairs: list[Any] = [None if of_rows is None else (of_rows, of_columns) for of_columns in columns]
        made = ending([gemm(rows, *given) for given in zip(weights, biases, pairs, strict=True)])
        return [*made, rows] if keeps else made

    made = received_first(chunks(a.shape[0], a.shape[1] * a.itemsize, team), gathered, multiplied)
    return made[0] if len(made) == 1 else [_joined_rows(each, team.size) for each in zip(*made, strict=True)]


def summed_gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales, team: Team, *, scatters: bool = False
) -> torch.Tensor:
    """The sum of the GEMMs; this rank's rows of it, if it `scatters` them."""
    summed, owners = (whole_tensors.scattered, team.size) if scatters else (whole_tensors.summed, 1)

    def multiplied(part: slice) -> torch.Tensor:
        pair = None if scales is None else (_chunk(scales[0], part, owners), scales[1])
        return gemm(_chunk(a, part, owners), b, _once(bias, team), pair)

    parts = chunks(len(a) // owners, b.shape[1] * result_type(a).itemsize, team)
    return sent_after(parts, multiplied, lambda made, part: summed(made, team))


def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales) -> torch.Tensor:
    """a @ b + bias, by PyTorch; with block scales, by the GEMM of experts."""
    if scales is not None and has_blocks(scales):
        return scaled_gemm(a, b, bias, *scales)
    if scales is not None:
        of_a, of_b = scales[0][:, None], scales[1][None]
        kind = result_type(a)
        return torch._scaled_mm(dense(a), b, of_a, of_b, bias=bias, out_dtype=kind, use_fast_accum=True)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _once(bias: torch.Tensor | None, team: Team) -> torch.Tensor | None:
    """The bias on one rank: it is added once, before parts are rounded."""
    return None if team.rank else bias


def _chunk(x: torch.Tensor, part: slice, owners: int = 1) -> torch.Tensor:
    """A chunk of the rows of each owner. All rows, as of a small tensor, are the tensor itself."""
    if part.stop - part.start == x.shape[0] // owners:
        return x
    return x[part] if owners == 1 else x.unflatten(0, (owners, -1))[:, part].flatten(0, 1)


def _joined_rows(parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """The rows of all ranks, rank by rank, of chunks that have some of each."""
    return torch.cat([part.view(size, -1, part.shape[1]) for part in parts], 1).flatten(0, 1)
