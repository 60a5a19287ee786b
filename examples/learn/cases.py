# SPDX-License-Identifier: MIT
"""What goes into a launch and what has to come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Tensors = Mapping[str, Sequence[torch.Tensor]]
"""By the name of a parameter, the tensor of every device."""


@dataclass(frozen=True)
class Case:
    """One launch: what goes in and what has to come out.

    Attributes:
        args: the tensors of every device, by the names of the parameters and in their order.
        want: what has to be there afterwards.
        mistakes: what a well-known mistake leaves instead: advice, and tensors like those of `want`.
        tolerance: how far an element may be off, relative to 1 + |what it should be|.
    """

    args: Tensors
    want: Tensors
    mistakes: Sequence[tuple[str, Tensors]] = ()
    tolerance: float = 0.0


def blank(*shape: int) -> torch.Tensor:
    """A float32 tensor for a result, full of NaN: what is not written is seen."""
    return torch.full(shape, torch.nan)


def integers(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: their sums and products are exact, in whatever order they are added up."""
    return torch.randint(-4, 5, shape, generator=rng).to(dtype)


def reals(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Normally distributed numbers: their sums depend on the order in which they are added up."""
    return torch.randn(shape, generator=rng)
