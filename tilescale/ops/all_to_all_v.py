# SPDX-License-Identifier: MIT
"""All-to-all of unequal parts: so many rows to each rank, so many from each (MPI_Alltoallv)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from tilescale.comm import Team
from tilescale.errors import ArgumentError, UsageError
from tilescale.ops.arguments import BYTES, check_tensor
from tilescale.ops.flat import more_rows, row_bytes, rows_of_bytes
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.operator import operator
from tilescale.ops.row_exchange import scatter_rows


def all_to_all_v(
    a: torch.Tensor, sent: Any, received: Sequence[int] | None = None, *, most: int | None = None, group: Any = None
) -> Any:
    """Rows to each rank, one part after the other, and what the others have for this one. Collective.

    Args:
        a: (rows, ...); first those for rank 0, then those for rank 1, and so on.
        sent: how many rows go to each rank. Numbers, as `torch.distributed.all_to_all_single` takes them; or a tensor
            of integers on the device of `a`, which the host does not look at.
        received: how many rows come from each rank. Numbers where `sent` is numbers; else None.
        most: rows that any rank sends to any other one at most, the same on all ranks. Left out, where the sizes are
            numbers, the ranks agree on it through the host, which takes a while, and is not for CUDA graphs.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        The rows of rank 0, of rank 1, and so on. With sizes on the device: a tensor with room for ranks * most rows,
        of which those that have come are first and the others are anything; and how many came from each rank, int32.
        It can be differentiated: its backward sends the gradients back.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        UsageError: a CUDA graph is captured, and the ranks would have to agree on `most`.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    name = group_name(group)
    if a.ndim == 0:
        raise ArgumentError("a has shape ()", hint="a has rows: reshape it")
    if most is not None and most < 1:
        raise ArgumentError(f"most is {most}", hint="give the rows that any rank sends to any other one at most")
    if isinstance(sent, torch.Tensor):
        return _of_device(a, sent, received, most, name)
    if received is None or isinstance(received, torch.Tensor):
        raise ArgumentError(
            f"sent is numbers, received is {type(received).__name__}",
            hint="give both as numbers, or sent alone as a tensor on the device",
        )
    for argument, sizes in ("sent", sent), ("received", received):
        _check_sizes(argument, sizes, size_of(name), most)
    rank = team_of(name).rank
    if sent[rank] != received[rank]:
        raise ArgumentError(
            f"sent has {sent[rank]} for rank {rank} itself, received {received[rank]}", hint="they are the same rows"
        )
    if sum(sent) != a.shape[0]:
        raise ArgumentError(f"a has {a.shape[0]} rows, sent names {sum(sent)}", hint="name each row of a once")
    return _operator(a, list(sent), list(received), most or 0, name)


def _of_device(a: torch.Tensor, sent: torch.Tensor, received: Any, most: int | None, name: str) -> Any:
    size = size_of(name)
    if received is not None:
        raise ArgumentError("received is given, and sent is a tensor", hint="leave received out: it is a result")
    if most is None:
        raise ArgumentError("most is None, and sent is a tensor", hint="say how many rows a rank sends at most")
    check_tensor("sent", sent, 1, (torch.int32, torch.int64))
    if sent.shape[0] != size:
        raise ArgumentError(f"sent has {sent.shape[0]} numbers, the group {size} ranks", hint="one for each rank")
    if a.shape[0] > size * most:
        raise ArgumentError(f"a has {a.shape[0]} rows, ranks send {size} times {most} at most", hint="raise most")
    return _counted(a, sent, most, name)


def _check_sizes(argument: str, sizes: Sequence[int], size: int, most: int | None) -> None:
    if len(sizes) != size:
        raise ArgumentError(
            f"{argument} has {len(sizes)} numbers, the group has {size} ranks", hint="one for each rank"
        )
    if min(sizes) < 0:
        raise ArgumentError(f"{argument} has {min(sizes)}", hint="numbers of rows are 0 or more")
    if most is not None and max(sizes) > most:
        raise ArgumentError(f"{argument} has {max(sizes)}, most is {most}", hint="raise most, on all ranks")


@operator("all_to_all_v")
def _operator(a: torch.Tensor, sent: list[int], received: list[int], most: int, group: str) -> torch.Tensor:
    """The rows that have come; `most` is 0 if the ranks have to agree on it."""
    team = team_of(group)
    if not most and a.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError("ranks agree on most, and a CUDA graph is captured", hint="give most to all_to_all_v")
    most = most or max(team.all_gather(max(*sent, *received)))
    if not most or not row_bytes(a):
        return a.new_empty(sum(received), *a.shape[1:])
    tables = _tables(tuple(sent), tuple(received), most, a.device)
    return _exchanged(a, tables, most, team)[: sum(received)]


@operator("all_to_all_v_counted")
def _counted(a: torch.Tensor, sent: torch.Tensor, most: int, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that have come, and behind them room; how many came from each rank."""
    team = team_of(group)
    sent = sent.to(torch.int32)
    # As numbers of a type that small gathers have: bits are moved.
    everyones = torch.ops.tilescale.all_gather(sent.view(torch.float32), 0, group).view(torch.int32)
    received = everyones.view(team.size, team.size)[:, team.rank].contiguous()
    if not row_bytes(a):
        return a.new_empty(team.size * most, *a.shape[1:]), received
    return _exchanged(a, tables_of(sent, received, most), most, team), received


def _exchanged(a: torch.Tensor, tables: tuple[torch.Tensor, ...], most: int, team: Team) -> torch.Tensor:
    """Rows by tables; all ranks have tensors of one shape."""
    order, sent, received, places = tables
    room = team.size * most
    result = scatter_rows(more_rows(rows_of_bytes(a), room), order, sent, (received, places, room), team)
    return result[:, : row_bytes(a)].contiguous().view(a.dtype).view(room, *a.shape[1:])


@lru_cache(256)
def _tables(sent: tuple[int, ...], received: tuple[int, ...], most: int, device: torch.device) -> Any:
    """The tables of sizes that the host knows, kept: a graph that is captured may not copy them to the device."""
    given = (torch.tensor(sizes, dtype=torch.int32) for sizes in (sent, received))
    return tuple(table.to(device) for table in tables_of(*given, most))


def tables_of(sent: torch.Tensor, received: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Which row is in which slot: of the own tensor, and of the result."""
    slots = torch.arange(most, dtype=torch.int32, device=sent.device)
    mine, theirs = (sizes.cumsum(0, dtype=torch.int32)[:, None] - sizes[:, None] + slots for sizes in (sent, received))
    order = mine.clamp(max=sent.shape[0] * most - 1)
    places = torch.where(slots < received[:, None], theirs, -1)
    return order, sent, received, places[:, :, None].contiguous()


@_operator.register_fake
def _(a: torch.Tensor, sent: list[int], received: list[int], most: int, group: str) -> torch.Tensor:
    return a.new_empty(sum(received), *a.shape[1:])


@_counted.register_fake
def _(a: torch.Tensor, sent: torch.Tensor, most: int, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = size_of(group)
    return a.new_empty(size * most, *a.shape[1:]), sent.new_empty(size, dtype=torch.int32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.most, ctx.group = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    back = _operator(grad, ctx.received, ctx.sent, ctx.most, ctx.group)
    return back, None, None, None, None


def _setup_counted(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, sent, ctx.most, ctx.group = inputs
    ctx.rows = a.shape[0]
    ctx.save_for_backward(sent, output[1])


def _backward_counted(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    sent, received = ctx.saved_tensors
    back, _ = _counted(grad, received, ctx.most, ctx.group)
    back = back[: ctx.rows]
    unsent = torch.arange(ctx.rows, device=back.device) >= sent.sum()
    return back.masked_fill(unsent.view(-1, *[1] * (back.ndim - 1)), 0), None, None, None


_operator.register_autograd(_backward, setup_context=_setup)
_counted.register_autograd(_backward_counted, setup_context=_setup_counted)
