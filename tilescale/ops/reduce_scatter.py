# SPDX-License-Identifier: MIT
"""Reduce-scatter: the sum of the ranks' tensors, of which each rank is left with its part."""

from typing import Any

import torch

import tilescale.language as T
from tilescale.ops import small
from tilescale.ops.arguments import SUMS, check_dim, check_divides, check_tensor
from tilescale.ops.flat import (
    CHUNKS,
    THREADS,
    WIDTHS,
    add_rows,
    chunk_rows,
    dtype_of,
    parts_of,
    send_to_owners,
    split,
    store_rows,
    tile_rows,
    whole,
)
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.workspace import workspace_of


def reduce_scatter(a: torch.Tensor, dim: int = 0, *, group: Any = None) -> torch.Tensor:
    """The own part, along a dimension, of the sum of all ranks' tensors. Collective.

    Sums are made in float32, in the order of the ranks that follow the own one, so they have the same bits each time.

    Args:
        a: of the same shape on all ranks; the extent of `dim` is a multiple of their number.
        dim: along which the sum is cut.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor with the extent of `dim` through the number of ranks. It can be differentiated: `all_gather` is its
        backward.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=SUMS)
    dim, name = check_dim("dim", dim, a), group_name(group)
    check_divides("a", a, dim, size_of(name))
    return torch.ops.tilescale.reduce_scatter(a, dim, name)


@torch.library.custom_op("tilescale::reduce_scatter", mutates_args=())
def _operator(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """The own part of the sum."""
    team = team_of(group)
    shape = list(a.shape)
    shape[dim] //= team.size
    if not a.numel():
        return a.new_empty(shape)
    parts = parts_of(split(a, dim, team.size), team.size)
    if small.is_whole(parts[0].nbytes, team):
        own = small.scattered(parts.view(-1, WIDTHS[-1]), team)
        return whole(own[None], tuple(shape))
    _, rows, width = parts.shape
    (inbox,) = workspace_of(team).symmetric(a.dtype, (team.size, rows, width))
    result = a.new_empty(1, rows, width)
    kernel(program, team, width, dtype_of(a), chunk_rows(width, a.itemsize))(parts, inbox, result)
    return whole(result, tuple(shape))


@_operator.register_fake
def _(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(a.shape)
    shape[dim] //= size_of(group)
    return a.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.group = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tilescale.all_gather(grad, ctx.dim, ctx.group), None, None


_operator.register_autograd(_backward, setup_context=_setup)


def program(size: int, width: int, dtype: str, chunk: int) -> Any:
    """The queue sends each part to its owner; blocks add up the own one and what has arrived."""
    rows, high = T.dynamic("rows"), tile_rows(width)

    @T.prim_func
    def reduce_scatter(
        A: T.Tensor((size, rows, width), dtype),
        inbox: T.Tensor((size, rows, width), dtype),
        C: T.Tensor((1, rows, width), dtype),
    ):
        with T.Kernel(device=size, block=T.ceildiv(rows, high), threads=THREADS) as tile:
            arrived = T.alloc_flags((size, CHUNKS))
            with T.Scale("device") as (rank, _):
                send_to_owners(A, inbox, arrived, rank, size, rows, chunk)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                total = T.alloc((high, width), "float32", level="l0")
                first = tile * high
                T.clear(total)
                add_rows(total, A, rank, first, rows, high, width)
                for step in T.serial(1, size):
                    source = (rank + step) % size
                    T.wait(arrived[source, first // chunk], ">=", 1)
                    add_rows(total, inbox, source, first, rows, high, width)
                store_rows(total, C, 0, first, rows, high, width)

    return reduce_scatter
