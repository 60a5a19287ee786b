# SPDX-License-Identifier: MIT
"""Broadcast: one rank's tensor, on every rank."""

from typing import Any

import torch

from tilescale.ops import whole_tensors
from tilescale.ops.arguments import BYTES, as_moved, check_rank, check_tensor, dense
from tilescale.ops.group import collective, group_name, rank_of, team_of
from tilescale.ops.operator import operator, operator_of
from tilescale.ops.plain_calls import plain_calls_repeat


@plain_calls_repeat
@collective
def broadcast(a: torch.Tensor, root: int = 0, *, group: Any = None) -> torch.Tensor:
    """The root's tensor, as a new tensor on every rank. Collective.

    Args:
        a: of the same shape on all ranks; only that of the root is read.
        root: a rank of the group.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.

    Returns:
        A tensor like `a`. It can be differentiated: the root's gradient is the sum of those of all ranks.

    Raises:
        ArgumentError: an unsupported argument; names it, and the supported ones.
        WaitTimeoutError, RankMismatchError, RankFailedError: as for a call of any kernel.
    """
    check_tensor("a", a, served=BYTES)
    name = group_name(group)
    check_rank("root", root, name)
    return as_moved(_operator, a, int(root), name)


@operator("broadcast")
def _operator(a: torch.Tensor, root: int, group: str) -> torch.Tensor:
    if not a.numel():
        return torch.empty_like(a, memory_format=torch.contiguous_format)
    return whole_tensors.sent_to_all(dense(a), team_of(group), root)


_operator.register_fake(lambda a, *_: torch.empty_like(a, memory_format=torch.contiguous_format))


@operator("broadcast_backward")
def _gradient(grad: torch.Tensor, root: int, group: str) -> torch.Tensor:
    """The sum of all ranks' gradients at the root; zeros elsewhere. An operator of its own: see that of scatter."""
    total = operator_of("all_reduce")(grad, "sum", group)
    return total if rank_of(group) == root else torch.zeros_like(total)


_gradient.register_fake(lambda grad, *_: torch.empty_like(grad, memory_format=torch.contiguous_format))

_operator.register_autograd(lambda ctx, grad: _gradient(grad, ctx.root, ctx.group))
_gradient.register_autograd(lambda ctx, given: _operator(given, ctx.root, ctx.group))
