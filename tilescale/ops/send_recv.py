# SPDX-License-Identifier: MIT
"""Tensors from one rank to another: a batch of messages of a group in one exchange, or one message of two ranks.

A batch is an exchange of unequal parts: messages to a rank are packed into one part, message after message, each a
whole number of 16 bytes. So no order of a list can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from tilescale.comm import Team, init
from tilescale.errors import ArgumentError, RankMismatchError, UsageError
from tilescale.ops.all_to_all_v import exchange_rows, on_device
from tilescale.ops.arguments import BYTES, check_rank, check_tensor, dense
from tilescale.ops.group import collective, group_name, rank_of, team_of, team_of_two
from tilescale.ops.operator import operator

UNIT_BYTES = 16


class Send(NamedTuple):
    """A message to a rank of the group, of a batch."""

    tensor: torch.Tensor
    to: int


class Recv(NamedTuple):
    """A message from a rank of the group, of a batch: a new tensor of the shape, type and device of `like`."""

    like: torch.Tensor
    source: int


@collective
def batch_send_recv(messages: Sequence[Send | Recv], *, group: Any = None) -> list[torch.Tensor]:
    """Send and receive any number of tensors at once. Collective: a rank without messages passes an empty list.

    Messages between two ranks are matched in the order in which each of the two lists them, independent of other
    entries, and a rank may send to itself.

    Args:
        messages: `ops.Send(tensor, to)` and `ops.Recv(like, source)`, in any order. A message has as many elements, of
            the same type, on both sides.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        The received tensors, for each `Recv` in order. It can be differentiated where a tensor of the batch requires a
        gradient, be it a `like`: the gradients go back as another batch, so all ranks call `backward`.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        RankMismatchError: emulated ranks send messages that are not received. On GPUs mismatched messages are not
            found, unless more is sent than received: then a later call, or `synchronize`, raises OutOfBoundsError.
        WaitTimeoutError, RankFailedError: as for a call of any kernel.
    """
    name = group_name(group)
    if not isinstance(messages, Sequence):
        raise ArgumentError(f"messages is {type(messages).__name__}", hint="give a list of ops.Send and ops.Recv")
    for i, message in enumerate(messages):
        _check_message(f"messages[{i}]", message, name)
    sends = [message for message in messages if isinstance(message, Send)]
    receives = [message for message in messages if isinstance(message, Recv)]
    return _operator(
        [x.resolve_conj() for x, _ in sends],
        [int(to) for _, to in sends],
        [like for like, _ in receives],
        [int(source) for _, source in receives],
        name,
    )


def _check_message(argument: str, message: Any, group: str) -> None:
    if not isinstance(message, Send | Recv):
        raise ArgumentError(
            f"{argument} is {type(message).__name__}", hint="give ops.Send(tensor, to) or ops.Recv(like, source)"
        )
    for name, value in message._asdict().items():
        if name in ("tensor", "like"):
            check_tensor(f"{argument}.{name}", value, served=BYTES)
        else:
            check_rank(f"{argument}.{name}", value, group)


@collective
def send(a: torch.Tensor, to: int, *, group: Any = None) -> None:
    """Send a tensor to another rank, which calls `ops.recv`. Only these two ranks take part.

    Messages between two ranks are matched in order. As with other collectives, both ranks have to make the call: where
    many ranks exchange, use `ops.batch_send_recv`, which needs no order.

    Args:
        a: the tensor to send. It gets no gradients, unlike in `ops.batch_send_recv`.
        to: a rank of the group, not this one.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        UsageError: within a function that torch.compile compiles as a whole.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    if a.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "a requires a gradient", hint="pass a.detach(), or use ops.batch_send_recv, which sends gradients back"
        )
    team = _pair("to", to, group)
    _exchanged([a.resolve_conj()], [1 - team.rank], [], [], team)


@collective
def recv(like: torch.Tensor, source: int, *, group: Any = None) -> torch.Tensor:
    """Receive a tensor that another rank sends by `ops.send`. Only these two ranks take part.

    Args:
        like: a tensor with the shape, type and device of the message; it is not changed.
        source: a rank of the group, not this one.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        The received data, as a new tensor.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        UsageError: within a function that torch.compile compiles as a whole.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("like", like, served=BYTES)
    team = _pair("source", source, group)
    return _exchanged([], [], [like], [1 - team.rank], team)[0]


def _pair(argument: str, peer: int, group: Any) -> Team:
    if is_compiling():
        raise UsageError(
            "ops.send and ops.recv are not compiled: a compiler drops a call without a result",
            hint="call ops.batch_send_recv, or leave them outside of the compiled function",
        )
    name = group_name(group)
    check_rank(argument, peer, name)
    if peer == rank_of(name):
        raise ArgumentError(f"{argument} is {peer}, this rank", hint="ops.batch_send_recv sends to the rank itself")
    return team_of_two(name, peer)


@operator("batch_send_recv")
def _operator(
    sent: list[torch.Tensor], to: list[int], like: list[torch.Tensor], sources: list[int], group: str
) -> list[torch.Tensor]:
    return _exchanged(sent, to, like, sources, team_of(group))


def _exchanged(
    sent: Sequence[torch.Tensor],
    to: Sequence[int],
    like: Sequence[torch.Tensor],
    sources: Sequence[int],
    team: Team,
) -> list[torch.Tensor]:
    device = next((x.device for x in (*sent, *like)), init().device)
    order = _by_rank(sources)
    parts = [_packed(sent[i]) for i in _by_rank(to)]
    rows = [-(-like[i].nbytes // UNIT_BYTES) for i in order]
    result = _units(max(sum(rows), 1), device)
    if not result.is_cuda:
        _compare(sent, to, like, sources, team)
    given = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else _units(1, device)
    counts = [0] * team.size
    for i, part in zip(_by_rank(to), parts, strict=True):
        counts[to[i]] += len(part)
    exchange_rows(given if len(given) else _units(1, device), on_device(tuple(counts), device), result, team)
    pieces = result[: sum(rows)].split(rows)
    made = {i: _unpacked(piece, like[i]) for i, piece in zip(order, pieces, strict=False)}
    return [made[i].clone() if len(like) > 1 else made[i] for i in range(len(like))]  # results share no memory


def _by_rank(ranks: Sequence[int]) -> list[int]:
    """The positions of messages, those of rank 0 first, and so on; those of one rank stay in order."""
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def _units(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, 2, dtype=torch.int64, device=device)


def _packed(x: torch.Tensor) -> torch.Tensor:
    flat = dense(x).view(-1)[:, None].view(torch.uint8).view(-1)
    missing = -len(flat) % UNIT_BYTES
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(torch.int64).view(-1, 2)


def _unpacked(units: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return units.view(-1).view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)


def _compare(
    sent: Sequence[torch.Tensor],
    to: Sequence[int],
    like: Sequence[torch.Tensor],
    sources: Sequence[int],
    team: Team,
) -> None:
    """Raise RankMismatchError unless the emulated ranks' messages are those that the others receive."""
    mine = [_listed(zip(x, ranks, strict=True), team.size) for x, ranks in ((sent, to), (like, sources))]
    every = team.all_gather(mine) if team.size > 1 else [mine]
    for rank, (sends, _) in enumerate(every):
        for other, (_, receives) in enumerate(every):
            if sends[other] != receives[rank]:
                raise RankMismatchError(
                    f"rank {rank} of the group sends {_said(sends[other])} to rank {other}, which receives "
                    f"{_said(receives[rank])}",
                    hint="list as many messages, of as many elements of the same type, in the same order on both ranks",
                )


def _listed(messages: Iterable[tuple[torch.Tensor, int]], size: int) -> list[list[tuple[int, str]]]:
    """For each rank the number and type of elements of its messages."""
    found: list[list[tuple[int, str]]] = [[] for _ in range(size)]
    for x, rank in messages:
        found[rank].append((x.numel(), str(x.dtype)))
    return found


def _said(messages: list[tuple[int, str]]) -> str:
    return " and ".join(f"{n} of {dtype}" for n, dtype in messages) or "nothing"


@_operator.register_fake
def _(
    sent: list[torch.Tensor], to: list[int], like: list[torch.Tensor], sources: list[int], group: str
) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    sent, ctx.to, like, ctx.sources, ctx.group = inputs
    ctx.forms = [(tuple(x.shape), x.dtype, x.device) for x in sent]
    ctx.count = len(like)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    like = [torch.empty((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.forms]
    return _operator(list(grads), ctx.sources, like, ctx.to, ctx.group), None, [None] * ctx.count, None, None


_operator.register_autograd(_backward, setup_context=_setup)
