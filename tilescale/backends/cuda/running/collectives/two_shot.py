# SPDX-License-Identifier: MIT
"""Two-shot all-reduce: every rank sums a part of the tensor and sends the sum to all others.

Between n ranks it moves 2 / n of the bytes of a one-shot all-reduce, in two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilescale.backends.cuda.running.collectives import dense, float8_lines, normalised
from tilescale.backends.cuda.running.collectives.exchanges import UNIT_BYTES, BlockMessages, HeaderCall, PartStrides
from tilescale.backends.cuda.running.collectives.kernels import combining
from tilescale.backends.cuda.running.collectives.setting import BoundCollective, PlacedCollective
from tilescale.backends.cuda.running.program_context import ProgramContext

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.steps import StreamWork


def allreduce(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.allreduce`, also with a norm. Collective."""
    if placed.made.norm is not None:
        return normalised.allreduce(context, placed, steps=2)
    by_lines, ranks = placed.made.wire is not None, placed.team(context).size
    messages = (
        float8_lines.LineMessages(context, placed)
        if by_lines
        else BlockMessages(context, placed, use(context, placed))
    )

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        part = _part(source.nbytes, ranks)
        return messages.between(source, target, PartStrides(part, source.nbytes, source_step=part, target_step=part))

    return lambda given: dense.along(0, given.source, given.target, exchange)


def use(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers for it."""
    part = None if placed.nbytes is None else _part(placed.nbytes, placed.team(context).size)
    return HeaderCall("reduce_twice", combining(placed.dtype, placed.made.reduction), part)


def _part(nbytes: int, ranks: int) -> int:
    """Bytes of a rank's part, aligned to a thread's store; the last ones are shorter, or empty."""
    units = -(-nbytes // UNIT_BYTES)
    return -(-units // ranks) * UNIT_BYTES
