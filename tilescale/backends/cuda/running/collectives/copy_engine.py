# SPDX-License-Identifier: MIT
"""Collectives by the copy engine: every device writes into all others, between two barriers of all devices.

SMs copy the device's local part concurrently, on a side stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilescale.backends.cuda.running.collectives.setting import (
    BoundCollective,
    Operands,
    PlacedCollective,
    SiblingDevices,
)
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.backends.cuda.running.streams import side_stream


def all_gather(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_gather`. Collective."""
    return _by_copies(context, placed, lambda given, size, peer: given)


def all_to_all(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_to_all`. Collective."""
    return _by_copies(context, placed, lambda given, size, peer: given.chunk(size, placed.made.axis)[peer])


def broadcast(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.broadcast`. Collective."""
    team, barrier = SiblingDevices.of(context, placed.made.level), context.barrier(placed.site(context))
    placed.written_by_peers()

    def bind(given: Operands) -> list[StreamWork]:
        everywhere = context.peer_group.everywhere(given.target)
        peers = [given.root + step for step in range(1, team.size)] if team.rank == given.root else []
        outs = [everywhere[context.peer_group.slot(team.device(peer))] for peer in peers]
        return [barrier, *(partial(out.copy_, given.target) for out in outs), barrier]

    return bind


def _by_copies(
    context: ProgramContext, placed: PlacedCollective, cut: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> BoundCollective:
    """Copies of `cut(source, size, rank)` to each rank."""
    team, axis = SiblingDevices.of(context, placed.made.level), placed.made.axis
    barrier = context.barrier(placed.site(context))
    placed.written_by_peers()

    def bind(given: Operands) -> list[StreamWork]:
        everywhere = context.peer_group.everywhere(given.target)
        share = given.target.shape[axis] // team.size

        def copy(rank: int) -> StreamWork:
            out = everywhere[context.peer_group.slot(team.device(rank))].narrow(axis, team.rank * share, share)
            return partial(out.copy_, cut(given.source, team.size, rank))

        others = [copy((team.rank + step) % team.size) for step in range(1, team.size)]
        return [barrier, partial(_concurrently, context.device, copy(team.rank), others), barrier]

    return bind


def _concurrently(device: torch.device, local: StreamWork, others: list[StreamWork]) -> None:
    """Copies to others on the current stream, and a local one concurrently on another."""
    current, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        local()
    for copy in others:
        copy()
    current.wait_stream(side)
