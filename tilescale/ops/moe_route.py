# SPDX-License-Identifier: MIT
"""Mixture of experts: where tokens go, and where they lie there, from the experts that they chose.

Every rank learns everybody's choices, by one small gather, and works out all tables for itself. So a token is sent once
to each rank that it needs, however many experts it chose there (as DeepEP does, DeepSeek-V3 technical report,
arXiv:2412.19437, section 3.2), nobody sends numbers ahead of the tokens, and the host looks at nothing.
"""

from typing import Any, NamedTuple

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.all_gather import all_gather
from tilescale.ops.arguments import SUMS, check_count, check_tensor
from tilescale.ops.group import collective, group_name, rank_of, size_of

ALIGN = 128
"""Rows of each expert begin at a multiple of so many: a tile of a product has those of one expert."""


class Routing(NamedTuple):
    """Where tokens go: what `moe_dispatch`, `grouped_matmul` and `moe_combine` share. Integers are int32.

    Attributes:
        weights: (room,), float32: the weight of each row here, 0 where there is none; None if none were given.
        counts: (experts of this rank,), how many rows each has; those of one begin at a multiple of `ALIGN`.
        owners: (room / ALIGN,), whose rows they are, among the experts of this rank; -1 for nobody's.
        order, sent: the own tokens that go to each rank, (ranks, most), and how many.
        received, places: how many come from each rank, and the rows that they become, (ranks, most, choices).
        before: (most + 1, ranks), how many tokens before each own one go to each rank.
        room: rows of the tensors that experts work on.
        tokens: of this rank.
        group: the name of the group.
    """

    weights: torch.Tensor | None
    counts: torch.Tensor
    owners: torch.Tensor
    order: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    places: torch.Tensor
    before: torch.Tensor
    room: int
    tokens: int
    group: str


@collective
def moe_route(
    chosen: torch.Tensor,
    experts: int,
    weights: torch.Tensor | None = None,
    *,
    most: int | None = None,
    room: int | None = None,
    group: Any = None,
) -> Routing:
    """Where the tokens of all ranks go, for the experts that they chose. Collective.

    Rows of an expert are in the order of ranks, then tokens, then choices, so sums over them are the same each time.

    Args:
        chosen: (tokens, choices), int32 or int64: numbers of experts; any other number stands for none,
            and is not found out on a device.
        experts: of all ranks, which have equally many, one after the other.
        weights: (tokens, choices), float32, bfloat16 or float16: how much of each expert a token takes. They become
            float32, and can be differentiated.
        most: tokens that any rank has at most, the same on all ranks. Left out, all have equally many.
        room: rows of the tensors that experts work on, the same on all ranks. Choices beyond it are dropped, those of
            the last experts first. Left out, there is room for all, whatever tokens choose.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Raises:
        ArgumentError: an argument is not supported: names it, and what is supported.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("chosen", chosen, 2, (torch.int32, torch.int64))
    name = group_name(group)
    size, (tokens, choices) = size_of(name), chosen.shape
    check_count("experts", experts)
    if experts % size:
        raise ArgumentError(f"experts is {experts}, the group has {size} ranks", hint="each rank has equally many")
    most = tokens if most is None else most
    check_count("most", most, least=0)
    if tokens > most:
        raise ArgumentError(f"chosen has {tokens} tokens, most is {most}", hint="raise most, on all ranks")
    if not most or not choices:
        raise ArgumentError(f"chosen has shape {tuple(chosen.shape)}", hint="give most if this rank has no tokens")
    local = experts // size
    if room is None:
        room = size * most * min(choices, local) + local * (ALIGN - 1)
    check_count("room", room)
    room = -(-room // ALIGN) * ALIGN
    mine = torch.nn.functional.pad(chosen.to(torch.int32), (0, 0, 0, most - tokens), value=-1)
    # As numbers of a type that small gathers have: bits are moved.
    everyones = all_gather(mine.view(torch.float32), group=name).view(torch.int32).view(size, most, choices)
    rank = rank_of(name)
    row, counts, owners = rows_of(everyones, rank, local, room)
    taken = None
    if weights is not None:
        check_tensor("weights", weights, 2, SUMS)
        if weights.shape != chosen.shape:
            raise ArgumentError(f"weights is {tuple(weights.shape)}, chosen {tuple(chosen.shape)}", hint="one for each")
        given = all_gather(torch.nn.functional.pad(weights.float(), (0, 0, 0, most - tokens)), group=name)
        taken = _by_row(given.view(-1), row.view(-1), room)
    order, sent, before = outgoing(mine, local, size)
    received, places = incoming(everyones, row, rank, local)
    return Routing(taken, counts, owners, order, sent, received, places, before, room, tokens, name)


def check_routing(routing: Any) -> None:
    """Raises ArgumentError for what `moe_route` does not give."""
    if not isinstance(routing, Routing):
        raise ArgumentError(f"routing is {type(routing).__name__}", hint="pass what moe_route gives")


def outgoing(mine: torch.Tensor, local: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`order`, `sent` and `before` of a Routing, from the own choices (most, choices); `local` experts a rank."""
    most = mine.shape[0]
    ranks = torch.arange(size, dtype=torch.int32, device=mine.device)
    goes = ((mine >= 0)[:, :, None] & (mine[:, :, None] // local == ranks)).any(1)
    before = torch.nn.functional.pad(goes.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    # Tokens that do not go to a rank are written into one place beyond, which nobody reads.
    slot = torch.where(goes, before[:-1], most).t().long()
    tokens = torch.arange(most, dtype=torch.int32, device=mine.device).expand(size, most)
    order = mine.new_zeros(size, most + 1).scatter_(1, slot, tokens)[:, :most].contiguous()
    return order, before[-1].contiguous(), before


def rows_of(
    everyones: torch.Tensor, rank: int, local: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each choice of all ranks (ranks, most, choices) its row on this rank, or -1; `counts` and `owners`."""
    expert = everyones.flatten() - rank * local
    expert = torch.where((expert >= 0) & (expert < local), expert, local).long()  # `local`: none of this rank's
    by_expert = expert.argsort(stable=True)
    counts = torch.zeros(local + 1, dtype=torch.int64, device=expert.device)
    counts = counts.scatter_add_(0, expert, torch.ones_like(expert))[:local]
    extents = (counts + ALIGN - 1) // ALIGN * ALIGN
    ends = extents.cumsum(0)
    begins = ends - extents
    # How much further an expert's rows begin than if there were no room between those of others.
    shift = torch.nn.functional.pad(begins - (counts.cumsum(0) - counts), (0, 1))
    place = torch.arange(expert.shape[0], device=expert.device) + shift[expert[by_expert]]
    row = torch.empty_like(place).scatter_(0, by_expert, place)
    row = torch.where((expert < local) & (row < room), row, -1).to(torch.int32)
    tiles = torch.arange(0, room, ALIGN, device=expert.device)
    owners = torch.searchsorted(ends, tiles, right=True)
    owners = torch.where(owners < local, owners, -1).to(torch.int32)
    kept = counts.minimum((room - begins).clamp(min=0))
    return row.view(everyones.shape), kept.to(torch.int32), owners


def incoming(everyones: torch.Tensor, row: torch.Tensor, rank: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`received` and `places` of a Routing, from all choices and their rows here (ranks, most, choices)."""
    size, most, choices = row.shape
    comes = ((everyones >= 0) & (everyones // local == rank)).any(2)
    slot = torch.where(comes, comes.cumsum(1) - 1, most)[:, :, None].expand(size, most, choices)
    places = row.new_full((size, most + 1, choices), -1).scatter_(1, slot, row)[:, :most].contiguous()
    return comes.sum(1, dtype=torch.int32), places


def _by_row(values: torch.Tensor, row: torch.Tensor, room: int) -> torch.Tensor:
    """The value of each row, which one choice has; 0 for rows of nobody."""
    place = torch.where(row >= 0, row, room).long()
    choice = torch.zeros(room + 1, dtype=torch.int64, device=row.device)
    choice = choice.scatter_(0, place, torch.arange(1, row.shape[0] + 1, device=row.device))[:room]
    return torch.where(choice > 0, values[(choice - 1).clamp(min=0)], 0)
