# SPDX-License-Identifier: MIT
"""Collectives by the copy engine: every device writes into all others, between two barriers of all devices.

SMs copy the device's local part concurrently, on a side stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.running.collectives.setting import Bound, Operands, Stand, Team
from tilescale.backends.cuda.running.program_context import Owner
from tilescale.backends.cuda.running.steps import Work
from tilescale.backends.cuda.running.streams import own_stream

if TYPE_CHECKING:
    import torch


def all_gather(own: Owner, stand: Stand) -> Bound:
    """`T.all_gather`. Collective."""
    return _by_copies(own, stand, lambda given, size, peer: given)


def all_to_all(own: Owner, stand: Stand) -> Bound:
    """`T.all_to_all`. Collective."""
    return _by_copies(own, stand, lambda given, size, peer: given.chunk(size, stand.made.axis)[peer])


def broadcast(own: Owner, stand: Stand) -> Bound:
    """`T.broadcast`. Collective."""
    team, barrier = Team.of(own, stand.made.level), _barrier(own, stand)
    stand.written_by_peers()

    def bind(given: Operands) -> list[Work]:
        everywhere = own.near.everywhere(given.target)
        peers = [given.root + step for step in range(1, team.size)] if team.rank == given.root else []
        outs = [everywhere[own.near.slot(team.device(peer))] for peer in peers]
        return [barrier, *(partial(out.copy_, given.target) for out in outs), barrier]

    return bind


def _barrier(own: Owner, stand: Stand) -> Work:
    own.sites.append(Site(stand.what, stand.where))
    return own.barrier(len(own.sites) - 1)


def _by_copies(own: Owner, stand: Stand, cut: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Bound:
    """Copies of `cut(source, size, rank)` to each rank."""
    team, axis, barrier = Team.of(own, stand.made.level), stand.made.axis, _barrier(own, stand)
    stand.written_by_peers()

    def bind(given: Operands) -> list[Work]:
        everywhere = own.near.everywhere(given.target)
        share = given.target.shape[axis] // team.size

        def copy(rank: int) -> Work:
            out = everywhere[own.near.slot(team.device(rank))].narrow(axis, team.rank * share, share)
            return partial(out.copy_, cut(given.source, team.size, rank))

        others = [copy((team.rank + step) % team.size) for step in range(1, team.size)]
        return [barrier, partial(_beside, own.device, copy(team.rank), others), barrier]

    return bind


def _beside(device: torch.device, local: Work, others: list[Work]) -> None:
    """Copies to others on the current stream, and a local one concurrently on another."""
    import torch

    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        local()
    for copy in others:
        copy()
    current.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return own_stream(device)
