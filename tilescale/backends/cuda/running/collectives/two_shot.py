# SPDX-License-Identifier: MIT
"""Two-shot all-reduce: every rank sums a part of the tensor and sends the sum to all others.

Between n ranks it moves 2 / n of the bytes of a one-shot all-reduce, in two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilescale.backends.cuda.running.collectives import dense, normalised
from tilescale.backends.cuda.running.collectives.exchanges import UNIT_BYTES, Messages, Parts, Use
from tilescale.backends.cuda.running.collectives.kernels import combining
from tilescale.backends.cuda.running.collectives.setting import Bound, Stand
from tilescale.backends.cuda.running.program_context import Owner

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.steps import Work


def allreduce(own: Owner, stand: Stand) -> Bound:
    """`T.allreduce`, also with a norm. Collective."""
    if stand.made.norm is not None:
        return normalised.allreduce(own, stand, steps=2)
    ranks, messages = stand.team(own).size, Messages(own, stand, use(own, stand))

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        part = _part(source.nbytes, ranks)
        return messages.between(source, target, Parts(part, source.nbytes, source_step=part, target_step=part))

    return lambda given: dense.along(0, given.source, given.target, exchange)


def use(own: Owner, stand: Stand) -> Use:
    """The function of the headers for it."""
    part = None if stand.nbytes is None else _part(stand.nbytes, stand.team(own).size)
    return Use("reduce_twice", combining(stand.dtype, stand.made.reduction), part)


def _part(nbytes: int, ranks: int) -> int:
    """Bytes of a rank's part, aligned to a thread's store; the last ones are shorter, or empty."""
    units = -(-nbytes // UNIT_BYTES)
    return -(-units // ranks) * UNIT_BYTES
