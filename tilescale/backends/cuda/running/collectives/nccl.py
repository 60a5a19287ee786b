# SPDX-License-Identifier: MIT
"""Collectives by NCCL, through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.setting import (
    BoundCollective,
    Operands,
    PlacedCollective,
    SiblingDevices,
)
from tilescale.backends.cuda.running.nccl import group, moved, reduce_op
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.errors import OutOfBoundsError
from tilescale.program.extents import UNFIT, unfit


def allreduce(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.allreduce`. Collective."""
    op, team = reduce_op(placed.made.reduction), group(context, placed.made.level)
    return lambda given: dense.in_place(given, lambda x: [partial(dist.all_reduce, x, op, group=team)])


def broadcast(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.broadcast`. Collective."""
    team, ranks = group(context, placed.made.level), SiblingDevices.of(context, placed.made.level)

    def bind(given: Operands) -> list[StreamWork]:
        root = context.team.ranks[ranks.device(given.root)]
        return dense.in_place(given, lambda x: [partial(dist.broadcast, moved(x), root, group=team)])

    return bind


def reduce_scatter(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.reduce_scatter`. Collective."""
    return _from_parts(context, placed, partial(dist.reduce_scatter_tensor, op=reduce_op(placed.made.reduction)))


def all_gather(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_gather`. Collective."""
    return _from_parts(context, placed, dist.all_gather_into_tensor)


def all_to_all(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_to_all`. Collective."""
    return _from_parts(context, placed, dist.all_to_all_single)


def all_to_all_v(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_to_all_v`: the host needs the number of rows, and waits for the device. Collective."""
    team, ranks, counts = (
        group(context, placed.made.level),
        SiblingDevices.of(context, placed.made.level),
        placed.made.counts,
    )
    if not counts:
        context.reads_at = placed.where

    def row_counts(given: Operands) -> list[list[int]]:
        if given.sent is None:
            return [[*counts[ranks.rank * ranks.size :][: ranks.size]], [*counts[ranks.rank :: ranks.size]]]
        arriving = torch.empty_like(given.sent)
        dist.all_to_all_single(arriving, given.sent, group=team)
        return torch.stack([given.sent, arriving]).tolist()

    def bind(given: Operands) -> list[StreamWork]:
        def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
            return [partial(launch, source, target)]

        def launch(source: torch.Tensor, target: torch.Tensor) -> None:
            sent, arriving = row_counts(given)
            _check_rows(placed, (len(source), len(target)), sent, arriving)
            given_rows, taken_rows = moved(source[: sum(sent)]), moved(target[: sum(arriving)])
            dist.all_to_all_single(taken_rows, given_rows, arriving, sent, group=team)
            if given.received is not None:
                given.received.copy_(torch.tensor(arriving))

        return dense.along(0, given.source, given.target, exchange)

    return bind


def _check_rows(placed: PlacedCollective, room: tuple[int, int], sent: list[int], arriving: list[int]) -> None:
    for gets, counts in enumerate((sent, arriving)):
        if min(counts) < 0 or sum(counts) > room[gets]:
            found = unfit(bool(gets), counts, room[gets])
            raise OutOfBoundsError(f"{placed.what}: {found}", hint=UNFIT, where=placed.where)


def _from_parts(context: ProgramContext, placed: PlacedCollective, exchange: Callable[..., Any]) -> BoundCollective:
    """From one tensor to another: `exchange(out, source, group=)`."""
    team = group(context, placed.made.level)

    def launch(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        return [partial(exchange, moved(target), moved(source), group=team)]

    return lambda given: dense.along(placed.made.axis, given.source, given.target, launch)
