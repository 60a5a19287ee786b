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
from tilescale.ops.float8 import Float8
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.group import group_name, rank_of, size_of
from tilescale.ops.moe_layer import moe_layer

WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of experts."""

SCALES = tuple(f"{name}_scale_inv" for name in WEIGHTS)
"""Those that float8 experts have in addition."""

SQUARES = (GROUP, GROUP)

OTHER_GATES = ("limit", "swiglu_alpha", "gate_softcap")
"""Attributes of float8 experts of transformers with another function than SwiGLU."""


class ParallelExperts(nn.Module):
    """SwiGLU experts, of which this rank has a part: see `moe_layer`.

    Attributes:
        gate_up_proj: (experts of this rank, 2 * inner, features).
        down_proj: (experts of this rank, features, inner).
        gate_up_proj_scale_inv, down_proj_scale_inv: of float8 experts, their `scales`.
        options: `most`, `room`, `float8` and `wire` as `moe_layer` takes them.
        dropped: with `room`, how many choices of each expert of this rank the last call dropped; None before.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, parameters: dict[str, nn.Parameter], group: str, options: dict[str, Any]):
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.group, self.options = group, options
        self.dropped: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, features), and of each token the experts of all ranks and their weights, (tokens, choices)."""
        scales = tuple(getattr(self, name) for name in SCALES) if hasattr(self, SCALES[0]) else None
        experts = self.gate_up_proj, self.down_proj
        made = moe_layer(x, (chosen, weights), *experts, scales=scales, group=self.group, **self.options)
        if isinstance(made, torch.Tensor):
            return made
        y, self.dropped = made
        return y

    def extra_repr(self) -> str:
        """The module's line in a printed model."""
        return f"experts={len(self.gate_up_proj)}, features={self.down_proj.shape[1]}, inner={self.down_proj.shape[2]}"


def parallelize_experts(
    module: nn.Module,
    group: Any = None,
    *,
    most: int | None = None,
    room: int | None = None,
    float8: Float8 | None = None,
    wire: str | None = None,
) -> nn.Module:
    """Distribute the experts of a model over the ranks, in place: those of Mixtral, Qwen3-MoE, DeepSeek-V3 and others.

    Experts are modules of `transformers` with `gate_up_proj` (experts, 2 * inner, features) and `down_proj` (experts,
    features, inner), and SiLU between them; in bfloat16, float16, or float8 with a scale for each square of 128, as
    DeepSeek-V3's checkpoints have them. Each becomes a `ParallelExperts` with this rank's part of the parameters, under
    the same names. Each rank passes its own tokens: parameters outside of experts have the gradients of these
    alone, as in data parallelism.

    Args:
        module: the model, the same on all ranks.
        group: a process group, a slice of a DeviceMesh, or None for all ranks of the job.
        most, room, float8, wire: as `moe_layer` takes them, in each call.

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
    options = {"most": most, "room": room, "float8": float8, "wire": wire}
    for path, experts in found.items():
        parts = {key: _part(parameter, size, rank) for key, parameter in experts.named_parameters(recurse=False)}
        module.set_submodule(path, ParallelExperts(parts, name, options).train(experts.training))
    return module


def _part(parameter: nn.Parameter, size: int, rank: int) -> nn.Parameter:
    """This rank's part, in separate memory."""
    mine = parameter.detach().chunk(size)[rank].clone()
    return nn.Parameter(mine, requires_grad=parameter.requires_grad)


def _is_experts(module: nn.Module) -> bool:
    up, down = (getattr(module, name, None) for name in WEIGHTS)
    if not (isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.ndim == down.ndim == 3):
        return False
    experts, features, inner = down.shape
    names = {name for name, _ in module.named_parameters(recurse=False)}
    is_float8 = names == {*WEIGHTS, *SCALES} and _has_squares(module)
    has_all = is_float8 or names == {*WEIGHTS}
    return up.shape == (experts, 2 * inner, features) and has_all and _is_silu(getattr(module, "act_fn", None))


def _has_squares(module: nn.Module) -> bool:
    is_plain = all(getattr(module, name, None) is None for name in OTHER_GATES)
    return is_plain and tuple(getattr(module, "block_size", None) or ()) == SQUARES


def _is_silu(function: Any) -> bool:
    """Whether a function is SiLU, tested by its values: libraries have separate classes."""
    x = torch.linspace(-4, 4, 17)
    return callable(function) and torch.equal(function(x), nn.functional.silu(x))
