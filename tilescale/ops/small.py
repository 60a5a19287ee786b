# SPDX-License-Identifier: MIT
"""Collectives of tensors as a whole, whose algorithm the machine model chooses.

Where little is moved, the latency of a copy queue is more than what overlap can save: small products are PyTorch's,
with such a collective before or after them. Between nodes large ones go in chunks, see chunks.py; the collectives
themselves work inside nodes and between them at once. A program is made for a number of elements, so numbers are
rounded up; what is large, inside a node, has a program that learns the number with the call.
"""

from functools import cache
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.cost.reach import linked
from tilescale.hda import Machine
from tilescale.hda.current import current_machine
from tilescale.ops.flat import dtype_of
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


def gathered(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The rows of all ranks, (ranks * rows, ...), of a contiguous tensor."""
    rows, known = a.shape[0], is_whole(a.nbytes, team)
    given = _padded(a[None], room(rows) if known else rows)
    result = a.new_empty(team.size, *given.shape[1:])
    made = kernel(program, team, "all_gather", given.numel() if known else None, dtype_of(a))
    made(given.view(-1), result.view(-1))
    return result[:, :rows].flatten(0, 1)


def scattered(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The own rows of the sum of contiguous tensors (ranks * rows, ...)."""
    rows, known = a.shape[0] // team.size, is_whole(a.nbytes // team.size, team)
    given = _padded(a.view(team.size, rows, *a.shape[1:]), room(rows) if known else rows)
    result = torch.empty_like(given[0])
    made = kernel(program, team, "reduce_scatter", result.numel() if known else None, dtype_of(a))
    made(given.view(-1), result.view(-1))
    return result[:rows]


def exchanged(a: torch.Tensor, team: Team) -> torch.Tensor:
    """Of contiguous tensors (ranks, rows, ...) the parts that are for this rank."""
    rows, known = a.shape[1], is_whole(a.nbytes // team.size, team)
    padded = _padded(a, room(rows) if known else rows)
    result = torch.empty_like(padded)
    made = kernel(program, team, "all_to_all", padded.nbytes // team.size if known else None, "uint8")
    made(padded.view(-1).view(torch.uint8), result.view(-1).view(torch.uint8))
    return result[:, :rows]


def summed(a: torch.Tensor, team: Team) -> torch.Tensor:
    """Change a contiguous tensor to the sum of those of all ranks; its rows are as many as `room` says."""
    kernel(sum_program, team, a.numel(), dtype_of(a))(a.view(-1))
    return a


def _padded(a: torch.Tensor, rows: int) -> torch.Tensor:
    """(parts, rows, ...) with room for more rows, whatever is in them."""
    if a.shape[1] == rows:
        return a
    made = a.new_empty(a.shape[0], rows, *a.shape[2:])
    made[:, : a.shape[1]] = a
    return made


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


def sum_program(size: int, elements: int, dtype: str) -> Any:
    """The sum of whole tensors, in place."""

    @T.prim_func
    def whole_sum(X: T.Tensor((elements,), dtype)):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.allreduce(X)

    return whole_sum
