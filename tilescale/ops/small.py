# SPDX-License-Identifier: MIT
"""Collectives of small tensors, whole: one kernel, whose algorithm the machine model chooses.

Where little is moved, the latency of a copy queue is more than what overlap can save: small products are PyTorch's,
with such a collective before or after them. A program is made for a number of elements, so numbers are rounded up.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.comm import Team
from tilescale.ops.flat import dtype_of
from tilescale.ops.kernels import kernel

SMALL_BYTES = 2 << 20
"""What a rank gives or keeps at most of what is small."""


def room(rows: int) -> int:
    """Rows that a program is made for: at most a quarter more, so that there are few programs."""
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


def gathered(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The rows of all ranks, (ranks * rows, ...), of a contiguous tensor."""
    rows, most = a.shape[0], room(a.shape[0])
    given = _padded(a[None], most)
    result = a.new_empty(team.size, most, *a.shape[1:])
    kernel(program, team, "all_gather", given.numel(), dtype_of(a))(given.view(-1), result.view(-1))
    return result[:, :rows].flatten(0, 1)


def scattered(a: torch.Tensor, team: Team) -> torch.Tensor:
    """The own rows of the sum of contiguous tensors (ranks * rows, ...)."""
    rows = a.shape[0] // team.size
    given = _padded(a.view(team.size, rows, *a.shape[1:]), room(rows))
    result = torch.empty_like(given[0])
    kernel(program, team, "reduce_scatter", result.numel(), dtype_of(a))(given.view(-1), result.view(-1))
    return result[:rows]


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


def program(size: int, name: str, elements: int, dtype: str) -> Any:
    """A collective from one whole tensor to another; `elements` of a part."""
    gathers = name == "all_gather"
    source, target = (elements, size * elements) if gathers else (size * elements, elements)

    @T.prim_func
    def whole_tensors(X: T.Tensor((source,), dtype), Y: T.Tensor((target,), dtype)):
        with T.Kernel(device=size):
            with T.Scale("device"):
                if gathers:
                    T.all_gather(X, Y)
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
