# SPDX-License-Identifier: MIT
"""MLPs with experts split over the ranks: by PyTorch's all-to-all and grouped_mm, and by TileScale.

Both take the router and this rank's experts of a block of `transformers`, and this rank's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tilescale import ops


class Experts(nn.Module):
    """Common part of both."""

    def __init__(self, block: nn.Module):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.gate, self.count = block.gate, block.experts.gate_up_proj.shape[0]
        for name in ("gate_up_proj", "down_proj"):
            part = getattr(block.experts, name).detach().chunk(size)[rank].clone()
            setattr(self, name, nn.Parameter(part))
        # Each rank has some of the tokens, so a part of the router's gradient.
        self.gate.weight.register_hook(_summed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, features) of this rank."""
        rows = x.flatten(0, -2)
        _, weights, chosen = self.gate(rows)
        return self.through(rows, weights, chosen).view(x.shape)

    def through(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens (n, features), with the share of each expert that they chose."""
        raise NotImplementedError


class Ours(Experts):
    """Experts by one operator."""

    def through(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Like `Experts.through`."""
        return ops.moe_layer(rows, (chosen, weights), self.gate_up_proj, self.down_proj)


class Torchs(Experts):
    """PyTorch's all-to-all with sizes that the host knows, and grouped_mm."""

    def through(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Like `Experts.through`."""
        size, local = dist.get_world_size(), self.count // dist.get_world_size()
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        come = torch.empty_like(counts)
        dist.all_to_all_single(come, counts)
        given, taken = counts.view(size, local).sum(1).tolist(), come.view(size, local).sum(1).tolist()
        token = order // chosen.shape[1]
        arrived = _exchanged(rows[token], taken, given)
        # Rows come by rank, then by expert; GEMMs want them by expert.
        expert = torch.arange(local, device=rows.device).repeat(size).repeat_interleave(come)
        by_expert = expert.argsort(stable=True)
        ends = come.view(size, local).sum(0).cumsum(0).to(torch.int32)
        x = arrived[by_expert]
        gate, up = torch._grouped_mm(x, self.gate_up_proj.mT, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(nn.functional.silu(gate) * up, self.down_proj.mT, offs=ends)
        back = _exchanged(y[by_expert.argsort()], given, taken)
        share = weights.flatten()[order][:, None].to(back.dtype)
        return torch.zeros_like(rows).index_add(0, token, back * share)


def _exchanged(x: torch.Tensor, taken: list[int], given: list[int]) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(x, taken, given, dist.group.WORLD)


def _summed(grad: Any) -> Any:
    dist.all_reduce(grad := grad.clone())
    return grad
