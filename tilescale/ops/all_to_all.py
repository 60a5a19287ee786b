# SPDX-License-Identifier: MIT
"""All-to-all: part j of every rank's tensor goes to rank j.

Cut along one dimension and joined along another it changes what a tensor is split by: from tokens to heads and back, as
Ulysses attention does (Jacobs et al., arXiv:2309.14509).
"""

from typing import Any

import torch

import tilescale.language as T
from tilescale.ops.arguments import MOVES, check_dim, check_divides, check_tensor
from tilescale.ops.flat import CHUNKS, THREADS, chunk_rows, copy_rows, dtype_of, join, parts_of, split, tile_rows, whole
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.workspace import workspace_of


def all_to_all(a: torch.Tensor, cut: int = 0, joined: int = 0, *, group: Any = None) -> torch.Tensor:
    """Cut every rank's tensor along a dimension, and join what the others have for this rank along one. Collective.

    Args:
        a: of the same shape on all ranks; the extent of `cut` is a multiple of their number.
        cut: part j along this dimension goes to rank j.
        joined: along which the parts that come are joined, that of rank 0 first.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        With cut 2 and joined 1, (batch, tokens / ranks, heads, size) becomes (batch, tokens, heads / ranks, size). It
        can be differentiated: its backward is the same with both dimensions exchanged.

    Raises:
        ArgumentError: names the argument that is not served, and what is.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=MOVES)
    cut, joined, name = check_dim("cut", cut, a), check_dim("joined", joined, a), group_name(group)
    check_divides("a", a, cut, size_of(name))
    return torch.ops.tilescale.all_to_all(a, cut, joined, name)


@torch.library.custom_op("tilescale::all_to_all", mutates_args=())
def _operator(a: torch.Tensor, cut: int, joined: int, group: str) -> torch.Tensor:
    """What the others have for this rank, joined."""
    team = team_of(group)
    given = split(a, cut, team.size)
    if not a.numel():
        return join(torch.empty_like(given), joined, team.size)
    parts = parts_of(given, team.size)
    _, rows, width = parts.shape
    (inbox,) = workspace_of(team).symmetric(a.dtype, (team.size, rows, width))
    result = torch.empty_like(parts)
    kernel(program, team, width, dtype_of(a), chunk_rows(width, a.itemsize))(parts, inbox, result)
    return join(whole(result, tuple(given.shape)), joined, team.size)


@_operator.register_fake
def _(a: torch.Tensor, cut: int, joined: int, group: str) -> torch.Tensor:
    shape = list(a.shape)
    shape[cut] //= size_of(group)
    shape[joined] *= size_of(group)
    return a.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.cut, ctx.joined, ctx.group = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.tilescale.all_to_all(grad, ctx.joined, ctx.cut, ctx.group), None, None, None


_operator.register_autograd(_backward, setup_context=_setup)


def program(size: int, width: int, dtype: str, chunk: int) -> Any:
    """The queue sends each part to its owner; blocks move what has arrived out of the workspace."""
    rows, high = T.dynamic("rows"), tile_rows(width)

    @T.prim_func
    def all_to_all(
        A: T.Tensor((size, rows, width), dtype),
        inbox: T.Tensor((size, rows, width), dtype),  # by source
        C: T.Tensor((size, rows, width), dtype),
    ):
        with T.Kernel(device=size, block=(T.ceildiv(rows, high), size), threads=THREADS) as (tile, turn):
            arrived = T.alloc_flags((size, CHUNKS))
            with T.Scale("device") as (rank, _):
                for step in T.serial(1, size):
                    for i in T.serial(T.ceildiv(rows, chunk)):
                        owner = (rank + step) % size
                        first, last = i * chunk, T.min(i * chunk + chunk, rows)
                        T.copy(
                            A[owner, first:last, :],
                            inbox[rank, first:last, :],
                            dst=owner,
                            signal=arrived[rank, i],
                        )
            with T.Scale("block"), T.Scale("device") as (rank, _):
                source = (rank + size - turn) % size  # the own part, then in the order in which they come
                first = tile * high
                if source == rank:
                    copy_rows(A, rank, C, rank, first, rows, high, width)
                else:
                    T.wait(arrived[source, first // chunk], ">=", 1)
                    copy_rows(inbox, source, C, source, first, rows, high, width)

    return all_to_all
