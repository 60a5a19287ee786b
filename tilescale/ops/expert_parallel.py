# SPDX-License-Identifier: MIT
"""Experts of a model over the ranks: in place of the experts of a block, a module that has this rank's.

Routers, shared experts and the rest of a block are unchanged. So this supports every block whose experts take tokens,
the experts of each token and their weights, as those of transformers do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilescale.errors import ArgumentError
from tilescale.ops.group import group_name, rank_of, size_of
from tilescale.ops.moe_layer import moe_layer


class ParallelExperts(nn.Module):
    """SwiGLU experts, of which this rank has a part: see `moe_layer`.

    Attributes:
        gate_up_proj: (experts of this rank, 2 * inner, features).
        down_proj: (experts of this rank, features, inner).
        most, room: as `moe_layer` takes them.
        dropped: with `room`, how many choices of each expert of this rank the last call dropped; None before.
    """

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter, group: str, most: int | None, room: int | None):
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.group, self.most, self.room = group, most, room
        self.dropped: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, features), and of each token the experts of all ranks and their weights, (tokens, choices)."""
        given = x, (chosen, weights), self.gate_up_proj, self.down_proj
        if self.room is None:
            return moe_layer(*given, most=self.most, group=self.group)  # type: ignore[return-value]
        y, self.dropped = moe_layer(*given, most=self.most, room=self.room, group=self.group)
        return y

    def extra_repr(self) -> str:
        """The module's line in a printed model."""
        return f"experts={len(self.gate_up_proj)}, features={self.down_proj.shape[1]}, inner={self.down_proj.shape[2]}"


def parallelize_experts(
    module: nn.Module, group: Any = None, *, most: int | None = None, room: int | None = None
) -> nn.Module:
    """Distribute the experts of a model over the ranks, in place: those of Mixtral, Qwen3-MoE, DeepSeek-V3 and others.

    Experts are modules of `transformers` with `gate_up_proj` (experts, 2 * inner, features) and `down_proj` (experts,
    features, inner), and SiLU between them. Each becomes a `ParallelExperts` with this rank's part of the parameters,
    under the same names. Each rank passes its own tokens: parameters outside of experts have the gradients of these
    alone, as in data parallelism.

    Args:
        module: the model, the same on all ranks.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.
        most, room: as `moe_layer` takes them, in each call.

    Returns:
        The model.

    Raises:
        ArgumentError: it has no such experts, or their number is not a multiple of the ranks. The model is unchanged.
    """
    name = group_name(group)
    size, rank = size_of(name), rank_of(name)
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module is {type(module).__name__}", hint="pass a torch.nn.Module")
    found = {path: experts for path, experts in module.named_modules() if _is_experts(experts)}
    if not found or "" in found:
        what = "is experts itself" if found else "has no experts of SwiGLU with gate_up_proj and down_proj"
        raise ArgumentError(f"module, {type(module).__name__}, {what}", hint="pass a model, or a block with experts")
    for path, experts in found.items():
        if len(experts.gate_up_proj) % size:
            raise ArgumentError(
                f"{path} has {len(experts.gate_up_proj)} experts, the group has {size} ranks",
                hint="each rank has equally many",
            )
    for path, experts in found.items():
        gate_up, down = (_part(p, size, rank) for p in (experts.gate_up_proj, experts.down_proj))
        module.set_submodule(path, ParallelExperts(gate_up, down, name, most, room).train(experts.training))
    return module


def _part(parameter: nn.Parameter, size: int, rank: int) -> nn.Parameter:
    """This rank's part, in separate memory."""
    mine = parameter.detach().chunk(size)[rank].clone()
    return nn.Parameter(mine, requires_grad=parameter.requires_grad)


def _is_experts(module: nn.Module) -> bool:
    up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.ndim == down.ndim == 3):
        return False
    experts, features, inner = down.shape
    has_more = len(list(module.parameters(recurse=False))) > 2  # such as biases
    return up.shape == (experts, 2 * inner, features) and not has_more and _is_silu(getattr(module, "act_fn", None))


def _is_silu(function: Any) -> bool:
    """Whether a function is SiLU, tested by its values: libraries have separate classes."""
    x = torch.linspace(-4, 4, 17)
    return callable(function) and torch.equal(function(x), nn.functional.silu(x))
