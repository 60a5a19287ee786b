# SPDX-License-Identifier: MIT
"""Operands of GEMMs whose N or K is not a multiple of a bulk copy: they are padded with zeros, results are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tilescale.ops.arguments import MULTIPLE, SCALED, as_moved, has_blocks, plain

if TYPE_CHECKING:
    from tilescale.ops.unfused import Scales


def padded(
    a: torch.Tensor,
    weights: list[torch.Tensor],
    bias: torch.Tensor | None,
    scales: Scales = None,
    multiple: int = 1,
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None, Scales]:
    """a (M, K), weights (K, N), one bias and the scales of the columns of all weights, N and K as programs take them.

    Those that are given where N and K are so; else a weight is copied in each call, which a layer avoids by features
    that are multiples of 8, or of 16 in float8. `multiple`: what N and K have to be a multiple of, in addition to what
    their type asks for.
    """
    unit = max(2 * MULTIPLE if a.dtype in SCALED else MULTIPLE, multiple)
    widths, K = [w.shape[1] for w in weights], a.shape[1]
    if not any(n % unit for n in (K, *widths)):
        return a, weights, bias, scales
    more = [-n % unit for n in widths]
    wider = [_more(w, -K % unit, n) for w, n in zip(weights, more, strict=True)]
    if scales is not None:
        scales = scales[0], scales[1] if has_blocks(scales) else _spread(scales[1], widths, more)
    bias = None if bias is None else _spread(bias, widths, more)
    return _more(a, 0, -K % unit), wider, bias, scales


def trimmed(made: torch.Tensor, columns: int) -> torch.Tensor:
    """The first columns of a result, contiguous: the result itself if it has no more."""
    return made if made.shape[1] == columns else plain(made[:, :columns])


def _more(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with further rows and columns of zeros, in its previous layout, also the transpose of a contiguous
    one."""
    if x.t().is_contiguous() and not x.is_contiguous():
        return as_moved(pad, x.t(), (0, rows, 0, columns)).t()
    return as_moved(pad, x, (0, columns, 0, rows))


def _spread(vector: torch.Tensor, widths: Sequence[int], more: Sequence[int]) -> torch.Tensor:
    """A number for each column of several weights, with further zeros after those of each."""
    return torch.cat([pad(part, (0, n)) for part, n in zip(vector.split(list(widths)), more, strict=True)])
