# SPDX-License-Identifier: MIT
"""Token-wise modules, such as norms, where tokens are split over the ranks: they work on shards.

PyTorch's `SequenceParallel` lets each operation of such a module see DTensors, which takes the host longer than the
device. A token's result depends on that token and on parameters that all ranks have, so the shard is enough. Under a
compiler's trace the module stays PyTorch's: a graph has no DTensors.

Each rank has a part of the gradient of such parameters. As PyTorch leaves it, AdamW's update sums it up three times.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from tilescale.ops.arguments import SUMS
from tilescale.ops.dtensors import DTensorPlacement, is_dtensor
from tilescale.ops.group import group_name
from tilescale.ops.operator import operator_of


def work_on_shards(module: nn.Module) -> None:
    """Let a module that has parameters, alike on all ranks, and no parts work on the shard of its input."""
    own = list(module.parameters(recurse=False))
    if own and not list(module.children()) and all(is_dtensor(each) for each in own):
        module.__class__ = _on_shards(type(module))  # type: ignore[arg-type] # a class is hashable
        _sum_gradients(module)


@cache
def _on_shards(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_OnShards, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _OnShards(nn.Module):
    """Class that precedes a module's class."""

    def forward(self, x: Any) -> Any:
        """The result for each token; a DTensor for a DTensor."""
        if torch.compiler.is_compiling() or not is_dtensor(x) or not _has_whole_tokens(x):
            return super().forward(x)
        from torch.distributed.tensor import Partial

        parts: dict[str, Any] = self._parameters
        # Each rank has a part of a replicated parameter's gradient: that of its tokens.
        shards = {name: each.to_local(grad_placements=[Partial()]) for name, each in parts.items() if each is not None}
        self.__dict__.update(shards)  # found before parameters are
        try:
            made = super().forward(x.to_local())
        finally:
            for name in shards:
                del self.__dict__[name]
        return DTensorPlacement.of(x).made_of(made)

    def __setstate__(self, state: Any) -> None:
        """A copy has no hooks of its parameters."""
        super().__setstate__(state)
        _sum_gradients(self)

    def _apply(self, *given: Any, **options: Any) -> Any:
        """Nor has a parameter that is put on another device."""
        made = super()._apply(*given, **options)
        _sum_gradients(self)
        return made


def _sum_gradients(module: nn.Module) -> None:
    """Let gradients of a module's parameters be summed over the ranks once, where they have been accumulated."""
    for parameter in module.parameters(recurse=False):
        hooks = parameter._post_accumulate_grad_hooks
        if hooks and _sum_gradient in hooks.values():
            parameter._post_accumulate_grad_hooks = hooks  # a tensor that was swapped for another has them in name only
        elif parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_sum_gradient)


def _sum_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = summed(parameter, parameter.grad)


def finished(parameter: torch.Tensor, grad: Any) -> Any:
    """The gradient that a parameter will have; summed over the ranks if our hook sums it after accumulation."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return summed(parameter, grad) if _sum_gradient in hooks.values() else grad


def summed(parameter: Any, grad: Any) -> Any:
    """Sum a partial gradient of a parameter over the ranks; return any other gradient unchanged. Collective."""
    if not is_dtensor(grad) or grad.dtype not in SUMS or not all(each.is_partial("sum") for each in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    whole = operator_of("all_reduce")(grad.to_local(), "sum", group_name(grad.device_mesh))
    lies = DTensorPlacement(grad.device_mesh, (Replicate(),), grad.shape, grad.stride())
    if is_dtensor(parameter) and (parameter.device_mesh, parameter.placements) == (lies.mesh, lies.placements):
        lies = DTensorPlacement.of(parameter)
    return lies.made_of(whole)


def _has_whole_tokens(x: Any) -> bool:
    (lies,) = x.placements
    return bool(lies.is_shard()) and lies.dim % x.ndim != x.ndim - 1
