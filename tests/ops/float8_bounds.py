# SPDX-License-Identifier: MIT
"""Error bounds of collectives that send float8, compared with float64, as docs/operators/float8.md states them."""

from __future__ import annotations

import torch

RELATIVE, OF_GROUP, LEAST = 2.0**-4, 1 / (224 * 2**10), 2.0**-135
"""Half a step of e4m3, relative to a number; half a step of its smallest numbers, relative to the largest of a group.

The third bound holds where all of a group is smaller than 2^-117.
"""


def bound_of_gather(x: torch.Tensor) -> torch.Tensor:
    """Of numbers in float64, (..., 128), which share a scale."""
    return RELATIVE * x.abs() + OF_GROUP * x.abs().amax(-1, keepdim=True) + LEAST


def bound_of_sum(every: torch.Tensor, dtype: torch.dtype, again: bool) -> torch.Tensor:
    """Of the sum of the ranks' numbers, (ranks, ..., 128); `again`: sums travel as well."""
    sent = bound_of_gather(every).sum(0)
    most = every.sum(0).abs() + sent
    adding = every.abs().sum(0) * len(every) * 2.0**-23
    rounding = adding + most * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return sent + rounding + (bound_of_gather(most + rounding) if again else 0)
