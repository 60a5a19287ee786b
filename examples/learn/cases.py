# SPDX-License-Identifier: MIT
"""Inputs of a launch and its expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensors = Mapping[str, Sequence[torch.Tensor]]
"""Tensors of every device, by the name of a parameter."""


@dataclass(frozen=True)
class Case:
    """One launch: its inputs and expected results.

    Attributes:
        args: the tensors of every device, by the names of the parameters and in their order.
        want: the expected results.
        mistakes: advice for well-known mistakes, and the tensors that each leaves instead of `want`.
        tolerance: error of an element, relative to 1 + |expected|.
    """

    args: Tensors
    want: Tensors
    mistakes: Sequence[tuple[str, Tensors]] = ()
    tolerance: float = 0.0


def blank(*shape: int) -> torch.Tensor:
    """Return a float32 tensor for a result, full of NaN, which shows elements without a result."""
    return torch.full(shape, torch.nan)


def integers(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers: their sums and products are exact, in any order."""
    return torch.randint(-4, 5, shape, generator=rng).to(dtype)


def reals(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Return normally distributed numbers: their sums depend on the order of additions."""
    return torch.randn(shape, generator=rng)
