# SPDX-License-Identifier: MIT
"""Collectives of tensors as a whole, whose algorithm the machine model chooses.

Where little is moved, the latency of a copy queue is more than what overlap can save: small products are PyTorch's,
with such a collective before or after them. Between nodes large ones go in chunks, see chunks.py; the collectives
themselves work inside nodes and between them at once. A program is made for a number of elements, so numbers are
rounded up; what is large, inside a node, has a program that learns the number with the call. What is rounded up alike
need not be alike: emulated ranks, which meet in every call, compare the numbers.
"""

from functools import cache
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.cost.reach import linked
from tilescale.errors import RankMismatchError
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.arguments import SUMS
from tilescale.ops.flat import dtype_of, plain
from tilescale.ops.kernels import kernel

SMALL_BYTES = 2 << 20
"""What a rank gives or keeps at most of what is small."""


def is_whole(nbytes: int, team: Team) -> bool:
    """Whether a tensor is moved as a whole: because it is small, or some of the ranks are on other nodes."""
    return nbytes <= SMALL_BYTES or spans_nodes(team)


def spans_nodes(team: Team) -> bool:
    """Whether no network of their own links all devices of a team, by the current machine."""
    return is_split(current_machine(), team.size)


@cache
def is_split(machine: Machine, size: int) -> bool:
    """Whether no network of their own links so many devices of a machine."""
    return linked(machine, ((machine.tensor_level.name, size),)) < size


def room(rows: int) -> int:
    """Rows that a program is made for: at most a quarter more, so that there are few programs."""
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


def gathered(
    a: torch.Tensor, team: Team, count: int | None = None, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows of all ranks, (ranks * rows, ...), of a contiguous tensor of any type.

    Of its elements so many `count`, None for all, here and in what follows: as many on all ranks. `into`: memory for
    the result, which is used where no row is padded.
    """
    compare_counts(a, team, count)
    rows, known = _made_for(a, 1, team)
    given, result = padded(a, 1, rows), _room(into, a, team.size * rows)
    x, y = (_moved(t, a.dtype if a.dtype in SUMS else torch.uint8) for t in (given, result))
    kernel(program, team, "all_gather", x.numel() if known else None, dtype_of(x))(x, y)
    return _cut(result, team.size, a.shape[0])


def scattered(
    a: torch.Tensor, team: Team, count: int | None = None, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The own rows of the sum of contiguous tensors (ranks * rows, ...)."""
    compare_counts(a, team, count)
    rows, known = _made_for(a, team.size, team)
    given, result = padded(a, team.size, rows), _room(into, a, rows)
    x, y = _moved(given, a.dtype), _moved(result, a.dtype)
    made = kernel(program, team, "reduce_scatter", y.numel() if known else None, dtype_of(a))
    made(x, y)
    return _cut(result, 1, a.shape[0] // team.size)


def exchanged(a: torch.Tensor, team: Team, count: int | None = None) -> torch.Tensor:
    """Of contiguous tensors (ranks * rows, ...) the parts that are for this rank."""
    compare_counts(a, team, count)
    rows, known = _made_for(a, team.size, team)
    given = padded(a, team.size, rows)
    result = torch.empty_like(given)
    x, y = _moved(given, torch.uint8), _moved(result, torch.uint8)
    made = kernel(program, team, "all_to_all", x.numel() // team.size if known else None, "uint8")
    made(x, y)
    return _cut(result, team.size, a.shape[0] // team.size)


def sent_to_all(a: torch.Tensor, team: Team, root: int, count: int) -> torch.Tensor:
    """The root's contiguous tensor."""
    compare_counts(a, team, count)
    rows, known = _made_for(a, 1, team)
    result = a.new_empty(rows, *a.shape[1:])
    result[: len(a)] = a
    x = _moved(result, torch.uint8)
    kernel(broadcast_program, team, root, x.numel() if known else None)(x)
    return _cut(result, 1, len(a))


def summed(
    a: torch.Tensor, team: Team, count: int | None = None, into: torch.Tensor | None = None, op: str = "sum"
) -> torch.Tensor:
    """The sum, or what else `op` names, of contiguous tensors of all ranks; without `into`, in place.

    Rows are as many as `room` says.
    """
    compare_counts(a, team, count)
    result = a if into is None else into
    x, y = _moved(a, a.dtype), _moved(result, a.dtype)
    kernel(sum_program, team, x.numel(), dtype_of(a), op)(x, y)
    return result


def compare_counts(a: torch.Tensor, team: Team, count: int | None = None) -> None:
    """Raise RankMismatchError if emulated ranks have different numbers of elements."""
    if a.is_cuda or team.size == 1:
        return
    every = team.all_gather(a.numel() if count is None else count)
    if other := next((rank for rank, elements in enumerate(every) if elements != every[0]), 0):
        raise RankMismatchError(
            f"rank 0 of the group has {every[0]} elements, rank {other} has {every[other]}",
            hint="all ranks pass tensors of the same shape",
        )


def _made_for(a: torch.Tensor, parts: int, team: Team) -> tuple[int, bool]:
    """Rows of each part that a program is called with, and whether it is made for their number."""
    rows, known = a.shape[0] // parts, is_whole(a.nbytes // parts, team)
    return (room(rows), True) if known else (rows, False)


def _moved(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor as a program takes it: elements of a type, one after the other."""
    flat = x if x.ndim == 1 else x.view(-1)
    return flat if flat.dtype is dtype else flat.view(dtype)


def _room(into: torch.Tensor | None, a: torch.Tensor, rows: int) -> torch.Tensor:
    """Memory for so many rows like those of `a`: what is given, if it has as many."""
    return into if into is not None and len(into) == rows else a.new_empty(rows, *a.shape[1:])


def padded(a: torch.Tensor, parts: int, rows: int) -> torch.Tensor:
    """(parts * rows, ...) with room for so many rows of each part, whatever is in them."""
    if a.shape[0] == parts * rows:
        return a
    made = a.new_empty(parts * rows, *a.shape[1:])
    made.unflatten(0, (parts, rows))[:, : a.shape[0] // parts] = a.unflatten(0, (parts, -1))
    return made


def _cut(made: torch.Tensor, parts: int, rows: int) -> torch.Tensor:
    """The first rows of each part of (parts * more rows, ...)."""
    if made.shape[0] == parts * rows:
        return made
    return plain(made.unflatten(0, (parts, -1))[:, :rows].flatten(0, 1))


def program(size: int, name: str, elements: int | None, dtype: str) -> Any:
    """A collective from one whole tensor to another; `elements` of a part, None for what a call brings."""
    part = T.dynamic("elements") if elements is None else elements
    source = part if name == "all_gather" else size * part
    target = part if name == "reduce_scatter" else size * part

    @T.prim_func
    def whole_tensors(X: T.Tensor((source,), dtype), Y: T.Tensor((target,), dtype)):
        with T.Kernel(device=size):
            with T.Scale("device"):
                if name == "all_gather":
                    T.all_gather(X, Y)
                elif name == "all_to_all":
                    T.all_to_all(X, Y)
                else:
                    T.reduce_scatter(X, Y)

    return whole_tensors


def broadcast_program(size: int, root: int, nbytes: int | None) -> Any:
    """Whole bytes of the root, in place; None for as many as a call brings."""
    extent = T.dynamic("nbytes") if nbytes is None else nbytes

    @T.prim_func
    def whole_broadcast(X: T.Tensor((extent,), "uint8")):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.broadcast(X, root)

    return whole_broadcast


def sum_program(size: int, elements: int, dtype: str, op: str = "sum") -> Any:
    """The sum of whole tensors, or what else `op` names, which may be in place."""

    @T.prim_func
    def whole_sum(X: T.Tensor((elements,), dtype), Y: T.Tensor((elements,), dtype)):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.allreduce(X, op=op, out=Y)

    return whole_sum
