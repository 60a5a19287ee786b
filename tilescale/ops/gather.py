# SPDX-License-Identifier: MIT
"""Gather: every rank's tensor, joined along a dimension on one rank."""

from typing import Any

import torch

from tilescale.ops import whole_tensors
from tilescale.ops.all_to_all_v import exchange_rows, on_device
from tilescale.ops.arguments import BYTES, as_moved, check_dim, check_rank, check_tensor, dense
from tilescale.ops.group import collective, group_name, rank_of, size_of, team_of
from tilescale.ops.layout import join, shape_with
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def gather(a: torch.Tensor, root: int = 0, dim: int = 0, *, group: Any = None) -> torch.Tensor:
    """The tensors of all ranks on the root, one after the other along a dimension. Collective.

    Args:
        a: of the same shape on all ranks.
        root: a rank of the group.
        dim: along which the tensors are joined.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        On the root a tensor with as many times the extent of `dim` as there are ranks; on other ranks one without
        elements, whose extent of `dim` is 0. It can be differentiated: `scatter` is its backward, so all ranks call
        `backward`, those other than the root on a sum of nothing.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    dim, name = check_dim("dim", dim, a), group_name(group)
    check_rank("root", root, name)
    return as_moved(_operator, a, root, dim, name)


@operator("gather")
def _operator(a: torch.Tensor, root: int, dim: int, group: str) -> torch.Tensor:
    team = team_of(group)
    whole_tensors.compare_counts(a, team)
    is_root = team.rank == root
    parts = a.new_empty(team.size * a.shape[0] if is_root else a.shape[0], *a.shape[1:])
    if a.numel():
        sent = on_device(tuple(int(rank == root) for rank in range(team.size)), a.device)
        exchange_rows(dense(a).view(1, -1), sent, parts.view(-1, a.numel()), team)
    return join(parts, dim, team.size) if is_root else a.new_empty(shape_with(a, dim, 0))


@_operator.register_fake
def _(a: torch.Tensor, root: int, dim: int, group: str) -> torch.Tensor:
    return a.new_empty(shape_with(a, dim, a.shape[dim] * size_of(group) if rank_of(group) == root else 0))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, ctx.root, ctx.dim, ctx.group = inputs
    ctx.shape = tuple(shape_with(a, ctx.dim, a.shape[ctx.dim] * size_of(ctx.group)))


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    given = grad if rank_of(ctx.group) == ctx.root else grad.new_empty(()).expand(ctx.shape)
    return operator_of("scatter")(given, ctx.root, ctx.dim, ctx.group)


_operator.register_autograd(_backward, setup_context=_setup)

# Elsewhere than at the root its result is empty, and a compiler leaves out what makes nothing, while the root waits.
torch.fx.node.has_side_effect(torch.ops.tilescale.gather.default)
