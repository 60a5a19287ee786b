# SPDX-License-Identifier: MIT
"""One-step collectives: every rank sends each other rank its part directly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilescale.backends.cuda.running.collectives import dense, unequal
from tilescale.backends.cuda.running.collectives.exchanges import Messages, Parts, Use
from tilescale.backends.cuda.running.collectives.kernels import combining, moving
from tilescale.backends.cuda.running.collectives.setting import Bound, Operands, Stand
from tilescale.backends.cuda.running.program_context import Owner

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.steps import Work


all_to_all_v = unequal.all_to_all_v


def reduce_scatter(own: Owner, stand: Stand) -> Bound:
    """`T.reduce_scatter`. Collective."""
    messages = Messages(own, stand, reducing(own, stand))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        return messages.between(source, target, Parts(target.nbytes, source.nbytes, source_step=target.nbytes))

    return _along(stand, exchange)


def all_gather(own: Owner, stand: Stand) -> Bound:
    """`T.all_gather`. Collective."""
    messages = Messages(own, stand, gathering(own, stand))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        return messages.between(source, target, Parts(source.nbytes, target.nbytes, target_step=source.nbytes))

    return _along(stand, exchange)


def all_to_all(own: Owner, stand: Stand) -> Bound:
    """`T.all_to_all`. Collective."""
    messages = Messages(own, stand, exchanging(own, stand))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        part = source.nbytes // messages.team.size
        return messages.between(source, target, Parts(part, source.nbytes, source_step=part, target_step=part))

    return _along(stand, exchange)


def broadcast(own: Owner, stand: Stand) -> Bound:
    """`T.broadcast`. Collective."""
    messages = Messages(own, stand, broadcasting(own, stand))

    def bind(given: Operands) -> list[Work]:
        def change(x: torch.Tensor) -> list[Work]:
            return messages.between(x, x, Parts(x.nbytes, x.nbytes * messages.team.size), given.root)

        return dense.in_place(given, change)

    return bind


def reducing(own: Owner, stand: Stand) -> Use:
    """The function of the headers for a reduce-scatter."""
    return Use("reduce", combining(stand.dtype, stand.made.reduction), _part(own, stand), ("false",))


def gathering(own: Owner, stand: Stand) -> Use:
    """The function of the headers for an all-gather."""
    return Use("move", moving(stand.dtype), _part(own, stand), ("true",))


def exchanging(own: Owner, stand: Stand) -> Use:
    """The function of the headers for an all-to-all."""
    return Use("move", moving(stand.dtype), _part(own, stand), ("false",))


def broadcasting(own: Owner, stand: Stand) -> Use:
    """The function of the headers for a broadcast."""
    return Use("broadcast", moving(stand.dtype), stand.nbytes)


def _part(own: Owner, stand: Stand) -> int | None:
    """Bytes of a part of the whole tensor."""
    return None if stand.nbytes is None else stand.nbytes // stand.team(own).size


def _along(stand: Stand, exchange: dense.Exchange) -> Bound:
    return lambda given: dense.along(stand.made.axis, given.source, given.target, exchange)
