# SPDX-License-Identifier: MIT
"""All-reduce: the sum of the ranks' tensors, on every rank.

Small tensors are summed by `T.allreduce`, for which the machine model chooses the algorithm. Of large ones each rank
sums a part: the copy queue sends parts to their owners and sums to everybody, chunk by chunk.
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.ops import small
from tilescale.ops.arguments import SUMS, check_tensor, dense
from tilescale.ops.flat import (
    CHUNKS,
    THREADS,
    WIDTHS,
    add_rows,
    chunk_rows,
    copy_rows,
    dtype_of,
    parts_of,
    send_parts,
    send_sums,
    store_rows,
    tile_rows,
)
from tilescale.ops.group import group_name, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.workspace import workspace_of


def all_reduce(a: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """The sum of all ranks' tensors, as a new tensor. Collective.

    Args:
        a: of the same shape on all ranks; bfloat16, float16 or float32. Sums are made in float32 where there are more
            than 4 MiB.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor like `a`. It can be differentiated: its backward is the sum of the gradients.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=SUMS)
    return torch.ops.tilescale.all_reduce(a, group_name(group))


@torch.library.custom_op("tilescale::all_reduce", mutates_args=())
def _operator(a: torch.Tensor, group: str) -> torch.Tensor:
    """The sum."""
    if not a.numel():
        return torch.empty_like(a, memory_format=torch.contiguous_format)
    return (_small if small.is_whole(a.nbytes, team_of(group), 2 * small.SMALL_BYTES) else _large)(a, group)


def _small(a: torch.Tensor, group: str) -> torch.Tensor:
    own = parts_of(a.view(1) if a.ndim == 0 else a, 1).view(-1, WIDTHS[-1])
    result = own.new_empty(small.room(own.shape[0]), WIDTHS[-1])
    result[: own.shape[0]] = own
    return small.summed(result, team_of(group)).view(-1)[: a.numel()].view(a.shape)


def _large(a: torch.Tensor, group: str) -> torch.Tensor:
    team = team_of(group)
    flat = dense(a).view(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % team.size))
    parts = parts_of(flat, team.size)
    inbox, gathered = workspace_of(team).symmetric(a.dtype, tuple(parts.shape), tuple(parts.shape))
    result = torch.empty_like(parts)
    _, _, width = parts.shape
    made = kernel(program, team, width, dtype_of(a), chunk_rows(width, a.itemsize))
    made(parts, inbox, gathered, result)
    flat = result.view(team.size, -1)[:, : flat.numel() // team.size]
    return flat.reshape(-1)[: a.numel()].view(a.shape)


@_operator.register_fake
def _(a: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tilescale.all_reduce(grad, ctx.group), None


_operator.register_autograd(_backward, setup_context=_setup)


def program(size: int, width: int, dtype: str, chunk: int) -> Any:
    """Each rank sums its part of what has arrived, and sends the sum to everybody."""
    rows, high = T.dynamic("rows"), tile_rows(width)

    @T.prim_func
    def all_reduce(
        A: T.Tensor((size, rows, width), dtype),
        inbox: T.Tensor((size, rows, width), dtype),  # by source
        G: T.Tensor((size, rows, width), dtype),
        C: T.Tensor((size, rows, width), dtype),
    ):
        with T.Kernel(device=size, block=(T.ceildiv(rows, high), size), threads=THREADS) as (tile, turn):
            arrived, gathered = T.alloc_flags((size, CHUNKS)), T.alloc_flags((size, CHUNKS))
            summed = T.alloc_flags((CHUNKS,))
            with T.Scale("device") as (rank, _):
                send_parts(A, inbox, arrived, rank, size, rows, chunk)
                send_sums(C, rank, G, summed, gathered, rank, size, rows, chunk, high)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                total = T.alloc((high, width), "float32", level="l0")
                part = (rank + size - turn) % size  # the own one first
                first = tile * high
                if part == rank:
                    T.clear(total)
                    add_rows(total, A, rank, first, rows, high, width)
                    for step in T.serial(1, size):
                        source = (rank + step) % size
                        T.wait(arrived[source, first // chunk], ">=", 1)
                        add_rows(total, inbox, source, first, rows, high, width)
                    store_rows(total, C, rank, first, rows, high, width)
                    T.signal(summed[first // chunk])
                else:
                    T.wait(gathered[part, first // chunk], ">=", 1)
                    copy_rows(G, part, C, part, first, rows, high, width)

    return all_reduce
