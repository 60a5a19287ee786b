# SPDX-License-Identifier: MIT
"""One-shot all-reduce: every rank sends its tensor to all others, and sums what it receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilescale.backends.cuda.running.collectives import dense, normalised
from tilescale.backends.cuda.running.collectives.exchanges import Messages, Parts, Use
from tilescale.backends.cuda.running.collectives.kernels import combining
from tilescale.backends.cuda.running.collectives.setting import Bound, Stand
from tilescale.backends.cuda.running.program_context import Owner

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.steps import Work


def allreduce(own: Owner, stand: Stand) -> Bound:
    """`T.allreduce`, also with a norm. Collective."""
    if stand.made.norm is not None:
        return normalised.allreduce(own, stand, steps=1)
    messages = Messages(own, stand, use(own, stand))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        return messages.between(source, target, Parts(source.nbytes, source.nbytes * messages.team.size))

    return lambda given: dense.along(0, given.source, given.target, exchange)


def use(own: Owner, stand: Stand) -> Use:
    """The function of the headers for it."""
    return Use("reduce", combining(stand.dtype, stand.made.reduction), stand.nbytes, ("true",))
