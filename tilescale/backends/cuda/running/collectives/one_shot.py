# SPDX-License-Identifier: MIT
"""One-shot all-reduce: every rank sends its tensor to all others, and sums what it receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilescale.backends.cuda.running.collectives import dense, normalised
from tilescale.backends.cuda.running.collectives.exchanges import BlockMessages, HeaderCall, PartStrides
from tilescale.backends.cuda.running.collectives.kernels import combining
from tilescale.backends.cuda.running.collectives.setting import BoundCollective, PlacedCollective
from tilescale.backends.cuda.running.program_context import ProgramContext

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.steps import StreamWork


def allreduce(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.allreduce`, also with a norm. Collective."""
    if placed.made.norm is not None:
        return normalised.allreduce(context, placed, steps=1)
    messages = BlockMessages(context, placed, use(context, placed))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        return messages.between(source, target, PartStrides(source.nbytes, source.nbytes * messages.team.size))

    return lambda given: dense.along(0, given.source, given.target, exchange)


def use(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers for it."""
    return HeaderCall("reduce", combining(placed.dtype, placed.made.reduction), placed.nbytes, ("true",))
