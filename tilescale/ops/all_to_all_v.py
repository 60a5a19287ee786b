# SPDX-License-Identifier: MIT
"""All-to-all of unequal parts: a number of rows for each pair of ranks (MPI_Alltoallv)."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.compiler import is_compiling

import tilescale.language as T
from tilescale.backends import device_services
from tilescale.comm import Team
from tilescale.comm.heap.lasting import lasting
from tilescale.errors import ArgumentError
from tilescale.ops.all_to_all import all_to_all
from tilescale.ops.arguments import BYTES, check_count, check_tensor, dense
from tilescale.ops.group import collective, group_name, rank_of, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.operator import operator
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def all_to_all_v(
    a: torch.Tensor, sent: Any, received: Sequence[int] | None = None, *, most: int | None = None, group: Any = None
) -> Any:
    """Send rows to each rank, one part after the other, and receive the rows addressed to this one. Collective.

    Args:
        a: (rows, ...); first those for rank 0, then those for rank 1, and so on.
        sent: how many rows go to each rank. Numbers, as `torch.distributed.all_to_all_single` takes them; or a tensor
            of integers on the device of `a`.
        received: how many rows come from each rank. Numbers where `sent` is numbers. Left out, it is a result: devices
            exchange the sizes, and the host waits for them, which no CUDA graph can have, unless `most` is given.
        most: rows that any rank sends to any other one at most, the same on all ranks. With device-side sizes the host
            does not read them, and the result has space for `most` rows from each rank. Host-side sizes are checked
            against it.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        The rows of rank 0, of rank 1, and so on; without `received`, and how many came from each rank, int32. With
        device-side sizes and `most`, the result has ranks * most rows, of which those that have arrived
        are first and the others are anything. It can be differentiated: its backward sends the gradients back.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        OutOfBoundsError: a later call's, or `synchronize`'s: more rows come than `received` or `most` says. Fewer are
            not found out: the last rows of the result are anything then.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    name = group_name(group)
    if a.ndim == 0:
        raise ArgumentError("a has shape ()", hint="a has rows: reshape it")
    if most is not None:
        check_count("most", most)
    if isinstance(sent, torch.Tensor):
        return _of_device(a, sent, received, most, name)
    _check_sizes("sent", sent, size_of(name), most)
    if received is None:
        return _learned(a, on_device(tuple(sent), a.device), name)
    _check_sizes("received", received, size_of(name), most)
    _check_rows(a, sent, received, rank_of(name))
    return _operator(a, list(sent), list(received), name)


def _check_rows(a: torch.Tensor, sent: Sequence[int], received: Sequence[int], rank: int) -> None:
    if sent[rank] != received[rank]:
        raise ArgumentError(
            f"sent has {sent[rank]} for rank {rank} itself, received {received[rank]}", hint="they are the same rows"
        )
    if sum(sent) != a.shape[0]:
        raise ArgumentError(f"a has {a.shape[0]} rows, sent names {sum(sent)}", hint="name each row of a once")


def _of_device(a: torch.Tensor, sent: torch.Tensor, received: Any, most: int | None, name: str) -> Any:
    size = size_of(name)
    if received is not None:
        raise ArgumentError("received is given, and sent is a tensor", hint="leave received out: it is a result")
    check_tensor("sent", sent, 1, (torch.int32, torch.int64))
    if sent.shape[0] != size:
        raise ArgumentError(f"sent has {sent.shape[0]} numbers, the group {size} ranks", hint="one for each rank")
    if most is None:
        return _learned(a, sent.to(torch.int32), name)
    if a.shape[0] > size * most:
        raise ArgumentError(f"a has {a.shape[0]} rows, ranks send {size} times {most} at most", hint="raise most")
    return _counted(a, sent, most, name)


def _learned(a: torch.Tensor, sent: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that have come, as many as they are, and how many from each rank."""
    not_recorded()
    received = all_to_all(sent, group=name)
    numbers = torch.stack([sent, received]).tolist()
    return _operator(a, numbers[0], numbers[1], name), received


def not_recorded() -> None:
    """Mark the current call as one that cannot be recorded, unless it is of a graph."""
    if not is_compiling():
        device_services().not_recorded()


def _check_sizes(argument: str, sizes: Any, size: int, most: int | None) -> None:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ArgumentError(
            f"{argument} is {type(sizes).__name__}",
            hint="give numbers, one for each rank, or sent alone as a tensor on the device",
        )
    if len(sizes) != size:
        raise ArgumentError(
            f"{argument} has {len(sizes)} numbers, the group has {size} ranks", hint="one for each rank"
        )
    for rank, n in enumerate(sizes):
        check_count(f"{argument}[{rank}]", n, least=0)
    if most is not None and max(sizes) > most:
        raise ArgumentError(f"{argument} has {max(sizes)}, most is {most}", hint="raise most, on all ranks")


@operator("all_to_all_v")
def _operator(a: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    team = team_of(group)
    # Devices may have said the numbers: a graph knows them only now.
    _check_sizes("sent", sent, team.size, None)
    _check_rows(a, sent, received, team.rank)
    result = a.new_empty(sum(received), *a.shape[1:])
    exchange_rows(a, on_device(tuple(sent), a.device), result, team)
    return result


@operator("all_to_all_v_counted")
def _counted(a: torch.Tensor, sent: torch.Tensor, most: int, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The received rows, followed by unused ones, and the number of rows from each rank."""
    result = a.new_empty(size_of(group) * most, *a.shape[1:])
    return result, exchange_rows(a, sent.to(torch.int32), result, team_of(group))


def exchange_rows(a: torch.Tensor, sent: torch.Tensor, result: torch.Tensor, team: Team) -> torch.Tensor:
    """Rows of all ranks into their results; returns how many have come from each."""
    received = torch.empty_like(sent)
    unit = UNITS[min(a.itemsize, 8)]
    given, made = (_as_rows(dense(x)).view(unit) for x in (a.resolve_conj(), result))
    kernel(program, team, dtype_of(given))(given, sent, made, received)
    return received


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.view(len(x), math.prod(x.shape[1:]))


UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the type that is moved."""


def on_device(sent: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers that the host knows, kept: a graph that is captured may not copy them to the device. A compiled one has
    constants of its own."""
    return torch.tensor(sent, dtype=torch.int32, device=device) if is_compiling() else _kept(sent, device)


@lru_cache(256)
def _kept(sent: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return lasting(lambda: torch.tensor(sent, dtype=torch.int32).to(device))


def program(size: int, dtype: str) -> Any:
    """Rows of any width, of which ranks have different numbers."""
    given, room, width = (T.dynamic(name) for name in ("given", "room", "width"))

    @T.prim_func
    def all_to_all_v(
        A: T.Tensor((given, width), dtype),
        sent: T.Tensor((size,), "int32"),
        C: T.Tensor((room, width), dtype),
        received: T.Tensor((size,), "int32"),
    ):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.all_to_all_v(A, C, sent, received)

    return all_to_all_v


@_operator.register_fake
def _(a: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    for rows in received:
        torch._check(rows >= 0)
    return a.new_empty(sum(received), *a.shape[1:])


@_counted.register_fake
def _(a: torch.Tensor, sent: torch.Tensor, most: int, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = size_of(group)
    return a.new_empty(size * most, *a.shape[1:]), sent.new_empty(size, dtype=torch.int32)


def _setup_counted(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, sent, ctx.most, ctx.group = inputs
    ctx.rows = a.shape[0]
    ctx.save_for_backward(sent, output[1])


def _backward_counted(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    sent, received = ctx.saved_tensors
    back, _ = _counted(grad, received, ctx.most, ctx.group)
    back = back[: ctx.rows]
    unsent = torch.arange(ctx.rows, device=back.device) >= sent.sum()
    return back.masked_fill(unsent.view(-1, *[1] * (back.ndim - 1)), 0)


_operator.register_autograd(lambda ctx, grad: _operator(grad, ctx.received, ctx.sent, ctx.group))
_counted.register_autograd(_backward_counted, setup_context=_setup_counted)
