# SPDX-License-Identifier: MIT
"""All-gather: every rank's tensor, joined along a dimension."""

from typing import Any

import torch

from tilescale.ops import small
from tilescale.ops.arguments import BYTES, as_moved, check_dim, check_tensor
from tilescale.ops.flat import join, parts_of, whole
from tilescale.ops.group import collective, group_name, size_of, team_of
from tilescale.ops.operator import operator, operator_of


@collective
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
    check_tensor("a", a, served=BYTES)
    return as_moved(_operator, a, check_dim("dim", dim, a), group_name(group))


@operator("all_gather")
def _operator(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """The gathered tensor."""
    team = team_of(group)
    shape = (team.size * a.shape[0], *a.shape[1:])
    if not a.numel():
        return join(a.new_empty(shape), dim, team.size)
    return join(whole(small.gathered(parts_of(a), team, a.numel()), shape, team.size), dim, team.size)


@_operator.register_fake
def _(a: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(a.shape)
    shape[dim] *= size_of(group)
    return a.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.group = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return operator_of("reduce_scatter")(grad, ctx.dim, ctx.group), None, None


_operator.register_autograd(_backward, setup_context=_setup)
