# SPDX-License-Identifier: MIT
"""All-gather: every rank's tensor, joined along a dimension."""

from typing import Any

import torch

import tilescale.language as T
from tilescale.ops import small
from tilescale.ops.arguments import MOVES, SUMS, check_dim, check_tensor
from tilescale.ops.flat import (
    CHUNKS,
    THREADS,
    WIDTHS,
    chunk_rows,
    copy_rows,
    dtype_of,
    join,
    parts_of,
    tile_rows,
    whole,
)
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.operator import operator
from tilescale.ops.workspace import workspace_of


def all_gather(a: torch.Tensor, dim: int = 0, *, group: Any = None) -> torch.Tensor:
    """The tensors of all ranks, one after the other along a dimension. Collective.

    Args:
        a: of the same shape on all ranks.
        dim: along which they are joined.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor with as many times the extent of `dim`. It can be differentiated: `reduce_scatter` is its backward.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=MOVES)
    return _operator(a, check_dim("dim", dim, a), group_name(group))


@operator("all_gather")
def _operator(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """The gathered tensor."""
    team = team_of(group)
    shape = (team.size * a.shape[0], *a.shape[1:])
    if not a.numel():
        return join(a.new_empty(shape), dim, team.size)
    own = parts_of(a, 1)
    if (a.dtype in SUMS or small.spans_nodes(team)) and small.is_whole(own.nbytes, team):
        given = own.view(-1, WIDTHS[-1])
        given = given if a.dtype in SUMS else given.view(torch.uint8)
        parts = small.gathered(given, team).view(a.dtype).view(team.size, -1, WIDTHS[-1])
        return join(whole(parts, shape), dim, team.size)
    _, rows, width = own.shape
    (gathered,) = workspace_of(team).symmetric(a.dtype, (team.size, rows, width))
    result = a.new_empty(team.size, rows, width)
    kernel(program, team, width, dtype_of(a), chunk_rows(width, a.itemsize))(own, gathered, result)
    return join(whole(result, shape), dim, team.size)


@_operator.register_fake
def _(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(a.shape)
    shape[dim] *= size_of(group)
    return a.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.group = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tilescale.reduce_scatter(grad, ctx.dim, ctx.group), None, None


_operator.register_autograd(_backward, setup_context=_setup)


def program(size: int, width: int, dtype: str, chunk: int) -> Any:
    """The queue sends the own part to everybody; blocks move what has arrived out of the workspace."""
    rows, high = T.dynamic("rows"), tile_rows(width)

    @T.prim_func
    def all_gather(
        A: T.Tensor((1, rows, width), dtype),
        G: T.Tensor((size, rows, width), dtype),
        C: T.Tensor((size, rows, width), dtype),
    ):
        with T.Kernel(device=size, block=(T.ceildiv(rows, high), size), threads=THREADS) as (tile, turn):
            arrived = T.alloc_flags((size, CHUNKS))
            with T.Scale("device") as (rank, _):
                for step in T.serial(1, size):
                    for i in T.serial(T.ceildiv(rows, chunk)):
                        first, last = i * chunk, T.min(i * chunk + chunk, rows)
                        T.copy(
                            A[0, first:last, :],
                            G[rank, first:last, :],
                            dst=(rank + step) % size,
                            signal=arrived[rank, i],
                        )
            with T.Scale("block"), T.Scale("device") as (rank, _):
                part = (rank + size - turn) % size  # the own one, then in the order in which they come
                first = tile * high
                if part == rank:
                    copy_rows(A, 0, C, rank, first, rows, high, width)
                else:
                    T.wait(arrived[part, first // chunk], ">=", 1)
                    copy_rows(G, part, C, part, first, rows, high, width)

    return all_gather
