# SPDX-License-Identifier: MIT
"""Collectives by messages between kernels of our own.

One-shot all-reduce: every rank sends its tensor to all others, and sums what it receives. Two-shot all-reduce: every
rank sums a part of the tensor and sends the sum to all others; between n ranks it moves 2 / n of the bytes of a
one-shot one, in two steps. Direct: every rank sends each other rank its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilescale.backends.cuda.running.collectives import dense, normalised, unequal
from tilescale.backends.cuda.running.collectives.exchanges import (
    UNIT_BYTES,
    BlockMessages,
    HeaderCall,
    MessageForms,
    PartStrides,
)
from tilescale.backends.cuda.running.collectives.float8_lines import LineMessages, kernel
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, combining, moving
from tilescale.backends.cuda.running.collectives.setting import BoundCollective, CollectiveLauncher, PlacedCollective
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork


@dataclass(frozen=True)
class MessageExchange:
    """A collective as an exchange of parts.

    Attributes:
        function: of the headers, with its last template arguments.
        part: bytes of a part, by those of the whole tensor and the number of ranks.
        steps: how often a rank sends.
        divides_source, divides_target: whether the source, or the target, consists of a part for each rank.
    """

    function: tuple[str, ...]
    part: Callable[[int, int], int] = lambda nbytes, ranks: nbytes // ranks
    steps: int = 1
    divides_source: bool = False
    divides_target: bool = False

    def call(self, context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
        """The function of the headers for a collective."""
        (name, *flags), made = self.function, placed.made
        element = combining(placed.dtype, made.reduction) if name.startswith("reduce") else moving(placed.dtype)
        part = None if placed.nbytes is None else self.part(placed.nbytes, placed.team(context).size)
        return HeaderCall(name, element, part, tuple(flags))

    def parts(self, nbytes: int, ranks: int) -> PartStrides:
        """The parts of contiguous tensors, of which the whole one has `nbytes`."""
        part = self.part(nbytes, ranks)
        total = nbytes if self.divides_source or self.divides_target else part * ranks
        return PartStrides(part, total, part * self.divides_source, part * self.divides_target)


def _whole(nbytes: int, ranks: int) -> int:
    return nbytes


def _aligned(nbytes: int, ranks: int) -> int:
    """Bytes of a rank's part, aligned to a thread's store; the last ones are shorter, or empty."""
    units = -(-nbytes // UNIT_BYTES)
    return -(-units // ranks) * UNIT_BYTES


_EXCHANGES = {
    ("allreduce", "one_shot"): MessageExchange(("reduce", "true"), _whole),
    ("allreduce", "two_shot"): MessageExchange(("reduce_twice",), _aligned, 2, True, True),
    ("reduce_scatter", "direct"): MessageExchange(("reduce", "false"), divides_source=True),
    ("all_gather", "direct"): MessageExchange(("move", "true"), divides_target=True),
    ("all_to_all", "direct"): MessageExchange(("move", "false"), divides_source=True, divides_target=True),
    ("broadcast", "direct"): MessageExchange(("broadcast",), _whole),
}


def launcher(operation: str, algorithm: str) -> CollectiveLauncher | None:
    """The launcher of an operation; None for other algorithms."""
    if (operation, algorithm) == ("all_to_all_v", "direct"):
        return unequal.all_to_all_v
    exchange = _EXCHANGES.get((operation, algorithm))
    return None if exchange is None else lambda context, placed: _bound(exchange, context, placed)


def kernels(context: ProgramContext, placed: PlacedCollective, algorithm: str) -> list[HeaderKernel]:
    """Kernels of messages that a collective compiles, as far as they are known before it is bound."""
    made = placed.made
    if (made.name, algorithm) == ("all_to_all_v", "direct"):
        return unequal.kernels(context, placed)
    if made.wire is not None:
        return [kernel(context, placed)] if placed.team(context).size > 1 else []
    exchange = _EXCHANGES.get((made.name, algorithm))
    if made.norm is not None:
        return normalised.kernels(context, placed, 2 if exchange is None else exchange.steps)
    if exchange is None:
        return []
    return list(MessageForms(context, placed, exchange.call(context, placed)).kernels.values())


def _bound(exchange: MessageExchange, context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """Collective."""
    made = placed.made
    if made.norm is not None:
        return normalised.allreduce(context, placed, exchange.steps)
    if made.wire is not None:
        return _along(exchange, placed, LineMessages(context, placed))
    messages = BlockMessages(context, placed, exchange.call(context, placed))
    if made.name != "broadcast":
        return _along(exchange, placed, messages)

    def change(x: torch.Tensor, root: int) -> list[StreamWork]:
        return messages.between(x, x, exchange.parts(x.nbytes, messages.team.size), root)

    return lambda given: dense.in_place(given, lambda x: change(x, given.root))


def _along(
    exchange: MessageExchange, placed: PlacedCollective, messages: BlockMessages | LineMessages
) -> BoundCollective:
    axis = 0 if placed.made.name == "allreduce" else placed.made.axis

    def between(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        whole = max(source.nbytes, target.nbytes)
        return messages.between(source, target, exchange.parts(whole, messages.team.size))

    return lambda given: dense.along(axis, given.source, given.target, between)
