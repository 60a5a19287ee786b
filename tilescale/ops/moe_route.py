# SPDX-License-Identifier: MIT
"""Mixture of experts: destinations and rows of tokens, from the experts that they chose.

Every rank receives all ranks' choices, by one small gather, and computes all tables itself. So a token is sent once to
each rank that it needs, independent of the number of its experts there (as DeepEP does, DeepSeek-V3 technical report,
arXiv:2412.19437, section 3.2). No counts are sent ahead of the tokens, and the host reads nothing.
"""

from typing import Any, NamedTuple

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import SUMS, check_count, check_same, check_tensor
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.moe_tables import ALIGN, made_tables, new_tables, returned
from tilescale.ops.operator import operator


class Routing(NamedTuple):
    """Routing of tokens, shared by `moe_dispatch`, `grouped_matmul` and `moe_combine`. Integers are int32.

    Attributes:
        weights: (room,), float32: the weight of each row here, 0 for unused rows; None without given weights.
        counts: (experts of this rank,), how many rows each has; those of one begin at a multiple of 128.
        dropped: (experts of this rank,), the number of choices of each without a row, beyond the capacity.
        owners: (room / 128,), the local expert of each 128 rows; -1 for unused ones.
        order, sent: this rank's tokens that go to each rank, (ranks, most), and their numbers.
        received, places: how many come from each rank, and the rows that they become, (ranks, most, choices).
        before: (most + 1, ranks), how many tokens before each own one go to each rank.
        used: (1,), the number of tiles of 128 rows with an expert: the first ones.
        room: rows of the tensors that experts work on.
        tokens: of this rank.
        group: the name of the group.
    """

    weights: torch.Tensor | None
    counts: torch.Tensor
    dropped: torch.Tensor
    owners: torch.Tensor
    order: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    places: torch.Tensor
    before: torch.Tensor
    used: torch.Tensor
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
    """Route the tokens of all ranks to the experts that they chose. Collective.

    Rows of an expert are in the order of ranks, then tokens, then choices, so sums over them are the same each time.

    Args:
        chosen: (tokens, choices), int32 or int64: numbers of experts; any other number stands for none,
            and is not found out on a device.
        experts: of all ranks, which have equally many, one after the other.
        weights: (tokens, choices), float32, bfloat16 or float16: how much of each expert a token takes. They become
            float32, and can be differentiated.
        most: tokens that any rank has at most, the same on all ranks. Left out, all have equally many.
        room: rows of the tensors that experts work on, the same on all ranks. Choices beyond it are dropped, those of
            the last experts first. Left out, all possible choices fit.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    name = group_name(group)
    check_choices(chosen, weights)
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
    room = room_for(size * most, choices, local) if room is None else room
    check_count("room", room)
    room = -(-room // ALIGN) * ALIGN
    made: Any = tables(chosen, weights, local, most, room, name)
    slots, *others = made
    given = [None if weights is None else slots, *others, room, tokens, name]
    return Routing(*given)


def check_choices(chosen: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Raise ArgumentError unless `chosen` has expert numbers (n, k), and `weights` is None or has their weights."""
    check_tensor("chosen", chosen, 2, (torch.int32, torch.int64))
    if weights is not None:
        check_tensor("weights", weights, 2, SUMS)
        check_same("device", "weights", weights, "chosen", chosen)
        if weights.shape != chosen.shape:
            raise ArgumentError(f"weights is {tuple(weights.shape)}, chosen {tuple(chosen.shape)}", hint="one for each")


def room_for(tokens: int, choices: int, local: int) -> int:
    """Number of rows that suffices for any choices of `tokens` tokens."""
    return tokens * min(choices, local) + local * (ALIGN - 1)


def check_routing(routing: Any) -> None:
    """Raises ArgumentError for what `moe_route` does not give."""
    if not isinstance(routing, Routing):
        raise ArgumentError(f"routing is {type(routing).__name__}", hint="pass what moe_route gives")


@operator("moe_tables")
def tables(
    chosen: torch.Tensor, weights: torch.Tensor | None, local: int, most: int, room: int, group: str
) -> list[torch.Tensor]:
    """The tensors of a Routing, in their order; without weights, the first one is zeros."""
    return made_tables(chosen, weights, local, most, room, team_of(group))


@tables.register_fake
def _(
    chosen: torch.Tensor, weights: torch.Tensor | None, local: int, most: int, room: int, group: str
) -> list[torch.Tensor]:
    return new_tables(chosen, size_of(group), local, most, room)


@operator("moe_returns")
def _returned(
    grads: torch.Tensor, received: torch.Tensor, places: torch.Tensor, before: torch.Tensor, tokens: int, group: str
) -> torch.Tensor:
    """The gradients of weights, from those of rows."""
    return returned(grads[None], received, places, before, team_of(group))[:tokens]


@_returned.register_fake
def _(grads: torch.Tensor, *others: Any) -> torch.Tensor:
    return grads.new_empty(others[-2], others[1].shape[2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    chosen, weights, *_, ctx.group = inputs
    ctx.save_for_backward(*output[6:9])
    ctx.tokens, ctx.dtype = chosen.shape[0], None if weights is None else weights.dtype


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    back = _returned(grads[0].contiguous(), *ctx.saved_tensors, ctx.tokens, ctx.group)
    return None, back.to(ctx.dtype), *[None] * 4


tables.register_autograd(_backward, setup_context=_setup)
