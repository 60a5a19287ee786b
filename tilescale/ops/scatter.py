# SPDX-License-Identifier: MIT
"""Scatter: the parts of one rank's tensor, a part for each rank."""

from typing import Any

import torch

from tilescale.ops import whole_tensors
from tilescale.ops.all_to_all_v import exchange_rows, on_device
from tilescale.ops.arguments import BYTES, as_moved, check_dim, check_divides, check_rank, check_tensor, dense
from tilescale.ops.group import collective, group_name, rank_of, size_of, team_of
from tilescale.ops.layout import shape_with, split
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def scatter(a: torch.Tensor, root: int = 0, dim: int = 0, *, group: Any = None) -> torch.Tensor:
    """This rank's part, along a dimension, of the root's tensor. Collective.

    Args:
        a: of the same shape on all ranks; only that of the root is read. The extent of `dim` is a multiple of the
            number of ranks.
        root: a rank of the group.
        dim: along which the tensor is cut.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor with the extent of `dim` divided by the number of ranks. It can be differentiated: `gather` is its
        backward.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    dim, name = check_dim("dim", dim, a), group_name(group)
    check_rank("root", root, name)
    check_divides("a", a, dim, size_of(name))
    return as_moved(_operator, a, root, dim, name)


@operator("scatter")
def _operator(a: torch.Tensor, root: int, dim: int, group: str) -> torch.Tensor:
    team = team_of(group)
    whole_tensors.compare_counts(a, team)
    made = a.new_empty(shape_with(a, dim, a.shape[dim] // team.size))
    if not a.numel():
        return made
    is_root, part = team.rank == root, (-1, made.numel())
    given = dense(split(a, dim, team.size)).view(part) if is_root else a.new_empty(1, made.numel())
    exchange_rows(given, on_device((int(is_root),) * team.size, a.device), made.view(part), team)
    return made


_operator.register_fake(
    lambda a, root, dim, group: a.new_empty(shape_with(a, dim, a.shape[dim] // size_of(group)))
)


@operator("scatter_backward")
def _gradient(grad: torch.Tensor, root: int, dim: int, group: str) -> torch.Tensor:
    """The root's gradient, gathered from all ranks; zeros elsewhere. An operator, as a compiled graph would leave out a
    gather whose result its rank does not use, and the other ranks would wait for that rank."""
    whole = operator_of("gather")(grad, root, dim, group)
    return whole if rank_of(group) == root else grad.new_zeros(_shape_of_whole(grad, dim, group))


_gradient.register_fake(lambda grad, root, dim, group: grad.new_empty(_shape_of_whole(grad, dim, group)))


def _shape_of_whole(part: torch.Tensor, dim: int, group: str) -> list[int]:
    return shape_with(part, dim, part.shape[dim] * size_of(group))


_operator.register_autograd(lambda ctx, grad: _gradient(grad, ctx.root, ctx.dim, ctx.group))
_gradient.register_autograd(lambda ctx, given: _operator(given, ctx.root, ctx.dim, ctx.group))
