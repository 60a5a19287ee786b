# SPDX-License-Identifier: MIT
"""One-step collectives: every rank sends each other rank its part directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tilescale.backends.cuda.running.collectives import dense, float8_lines, unequal
from tilescale.backends.cuda.running.collectives.exchanges import BlockMessages, HeaderCall, PartStrides
from tilescale.backends.cuda.running.collectives.kernels import combining, moving
from tilescale.backends.cuda.running.collectives.setting import BoundCollective, Operands, PlacedCollective
from tilescale.backends.cuda.running.program_context import ProgramContext

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.steps import StreamWork


all_to_all_v = unequal.all_to_all_v


def reduce_scatter(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.reduce_scatter`. Collective."""
    messages = _messages(context, placed, reducing)

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        return messages.between(source, target, PartStrides(target.nbytes, source.nbytes, source_step=target.nbytes))

    return _along(placed, exchange)


def all_gather(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_gather`. Collective."""
    messages = _messages(context, placed, gathering)

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        return messages.between(source, target, PartStrides(source.nbytes, target.nbytes, target_step=source.nbytes))

    return _along(placed, exchange)


def all_to_all(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_to_all`. Collective."""
    messages = BlockMessages(context, placed, exchanging(context, placed))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        part = source.nbytes // messages.team.size
        return messages.between(source, target, PartStrides(part, source.nbytes, source_step=part, target_step=part))

    return _along(placed, exchange)


def broadcast(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.broadcast`. Collective."""
    messages = BlockMessages(context, placed, broadcasting(context, placed))

    def bind(given: Operands) -> list[StreamWork]:
        def change(x: torch.Tensor) -> list[StreamWork]:
            return messages.between(x, x, PartStrides(x.nbytes, x.nbytes * messages.team.size), given.root)

        return dense.in_place(given, change)

    return bind


def reducing(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers for a reduce-scatter."""
    return HeaderCall("reduce", combining(placed.dtype, placed.made.reduction), _part(context, placed), ("false",))


def gathering(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers for an all-gather."""
    return HeaderCall("move", moving(placed.dtype), _part(context, placed), ("true",))


def exchanging(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers for an all-to-all."""
    return HeaderCall("move", moving(placed.dtype), _part(context, placed), ("false",))


def broadcasting(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers for a broadcast."""
    return HeaderCall("broadcast", moving(placed.dtype), placed.nbytes)


def _messages(
    context: ProgramContext, placed: PlacedCollective, use: Callable[[ProgramContext, PlacedCollective], HeaderCall]
) -> BlockMessages | float8_lines.LineMessages:
    if placed.made.wire is not None:
        return float8_lines.LineMessages(context, placed)
    return BlockMessages(context, placed, use(context, placed))


def _part(context: ProgramContext, placed: PlacedCollective) -> int | None:
    return None if placed.nbytes is None else placed.nbytes // placed.team(context).size


def _along(placed: PlacedCollective, exchange: dense.Exchange) -> BoundCollective:
    return lambda given: dense.along(placed.made.axis, given.source, given.target, exchange)
