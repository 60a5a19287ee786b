# SPDX-License-Identifier: MIT
"""Sums by the copy engine: parts of all ranks come to lie side by side, and each device adds up its own.

What a copy engine cannot do, combining, PyTorch's kernels do: in the order of ranks, narrow floats in float32, rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.setting import Bound, Stand, Team
from tilescale.backends.cuda.running.collectives.workspaces import Landing
from tilescale.backends.cuda.running.owner import Owner
from tilescale.backends.cuda.running.steps import Work

if TYPE_CHECKING:
    import torch

COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""What PyTorch calls combining operations."""


def combined(parts: Sequence[torch.Tensor] | torch.Tensor, reduction: str) -> torch.Tensor:
    """The combination of tensors in their order, of short floating types in float32."""
    import torch

    combine, dtype = getattr(torch, COMBINE[reduction]), parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total: torch.Tensor = parts[0].to(wide)
    for part in parts[1:]:
        total = combine(total, part.to(wide))
    return total


def reduce_scatter(own: Owner, stand: Stand) -> Bound:
    """`T.reduce_scatter`. Collective."""
    parts = _Parts(own, stand)

    def launch(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        given = source.reshape(-1).split(target.numel())
        return parts.summed(given, target.view(-1), parts.landing(target.view(-1), 1)[0])

    return lambda given: dense.along(stand.made.axis, given.source, given.target, launch)


def allreduce(own: Owner, stand: Stand) -> Bound:
    """`T.allreduce`: a reduce-scatter, then an all-gather of the sums. Collective."""
    parts = _Parts(own, stand)
    rank, size = parts.team.rank, parts.team.size

    def launch(tensor: torch.Tensor) -> list[Work]:
        whole = tensor.view(-1)
        given = whole.tensor_split([-(-whole.numel() // size) * r for r in range(1, size)])
        brought, sums = parts.landing(given[0], 2)
        outs = [sums[r][: part.numel()] for r, part in enumerate(given)]
        sent = parts.sent([outs[rank]] * size, sums)
        taken = [partial(part.copy_, out) for part, out in zip(given, outs, strict=True)]
        return [*parts.summed(given, outs[rank], brought), *sent, parts.barrier, *taken]

    return lambda given: dense.in_place(given.target, launch)


class _Parts:
    """Where parts of all ranks lie side by side, in a workspace of this device.

    Attributes:
        barrier: all devices are done with what they were given before.
    """

    def __init__(self, own: Owner, stand: Stand):
        """Collective."""
        self._own, self._made, self.team = own, stand.made, Team.of(own, stand.made.level)
        own.sites.append(Site(stand.what, stand.where))
        self.barrier = own.barrier(len(own.sites) - 1)

    def landing(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Workspaces (count, ranks, elements) for parts like this one. Collective if they are new."""
        nbytes = count * self.team.size * part.nbytes
        slots = self._own.exchanges.get(Landing(self._made.level, nbytes), self._own.near).slots
        return slots[:nbytes].view(part.dtype).view(count, self.team.size, part.numel())

    def sent(self, parts: Sequence[torch.Tensor], landing: torch.Tensor) -> list[Work]:
        """Copies of a part to each peer, the next one first."""
        rank, size, near = self.team.rank, self.team.size, self._own.near
        everywhere = near.everywhere(landing)
        works: list[Work] = []
        for peer in ((rank + step) % size for step in range(1, size)):
            out = everywhere[near.slot(self.team.device(peer)), rank, : parts[peer].numel()]
            works.append(partial(out.copy_, parts[peer]))
        return works

    def summed(self, parts: Sequence[torch.Tensor], out: torch.Tensor, landing: torch.Tensor) -> list[Work]:
        """Exchange parts; what comes here is combined into `out`."""
        rank = self.team.rank
        brought = [parts[rank] if r == rank else mine[: out.numel()] for r, mine in enumerate(landing)]
        reduction = self._made.reduction
        return [
            self.barrier,
            *self.sent(parts, landing),
            self.barrier,
            lambda: out.copy_(combined(brought, reduction)),
        ]
