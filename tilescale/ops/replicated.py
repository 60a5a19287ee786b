# SPDX-License-Identifier: MIT
"""Values that all ranks have alike, next to those of which each has a part: one step's backward is the other step.

A value that all ranks have alike, and each uses for its own part, has the sum of the ranks' gradients. A sum of the
ranks' parts that each rank uses alike has one gradient, which all have. `all_reduce` sums both times: its results are
used by each rank for something else.
"""

from __future__ import annotations

from typing import Any

import torch

from tilescale.ops.operator import keep_machine, operator_of, with_machine


def used_in_parts(x: torch.Tensor, group: str) -> torch.Tensor:
    """A value that all ranks have alike, for use by each for its own part: its gradient is the sum of theirs."""
    made: torch.Tensor = _ReplicatedInput.apply(x, group)
    return made


def summed_alike(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of the ranks' parts, which each uses alike: a part's gradient is that of the sum. Collective."""
    if torch.is_grad_enabled() and x.requires_grad:
        made: torch.Tensor = _SummedParts.apply(x, group)
        return made
    return operator_of("all_reduce")(x, "sum", group)


class _ReplicatedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:  # noqa: D102 - see the function
        ctx.group = group
        keep_machine(ctx)
        return x.view_as(x)

    @staticmethod
    @with_machine
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102 - see the function
        return summed_alike(grad, ctx.group), None


class _SummedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:  # noqa: D102 - see the function
        ctx.group = group
        keep_machine(ctx)
        return operator_of("all_reduce")(x, "sum", group)

    @staticmethod
    @with_machine
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102 - see the function
        return used_in_parts(grad, ctx.group), None
