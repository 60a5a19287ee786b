# SPDX-License-Identifier: MIT
"""Modules that treat each token by itself, such as norms, where tokens lie over the ranks: they work on shards.

PyTorch's `SequenceParallel` lets each operation of such a module see DTensors, which takes the host longer than the
device. A token's result depends on that token and on parameters that all ranks have, so the shard is enough. What a
compiler traces stays PyTorch's: in a graph nothing of DTensors is left.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from tilescale.ops.dtensors import Lies, is_dtensor


def work_on_shards(module: nn.Module) -> None:
    """Let a module that has parameters, alike on all ranks, and no parts work on the shard of its input."""
    own = list(module.parameters(recurse=False))
    if own and not list(module.children()) and all(is_dtensor(each) for each in own):
        module.__class__ = _on_shards(type(module))


@cache
def _on_shards(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_OnShards, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _OnShards(nn.Module):
    """What stands in front of a module's class."""

    def forward(self, x: Any) -> Any:
        """The result for each token; a DTensor for a DTensor."""
        if torch.compiler.is_compiling() or not is_dtensor(x) or not _has_whole_tokens(x):
            return super().forward(x)
        from torch.distributed.tensor import Partial

        parts = self._parameters
        # Each rank has a part of the gradient of what all have: that of its tokens.
        shards = {name: each.to_local(grad_placements=[Partial()]) for name, each in parts.items() if each is not None}
        self.__dict__.update(shards)  # found before parameters are
        try:
            made = super().forward(x.to_local())
        finally:
            for name in shards:
                del self.__dict__[name]
        return Lies.of(x).made_of(made)


def _has_whole_tokens(x: Any) -> bool:
    """Whether each rank has some tokens, with all of their features."""
    (lies,) = x.placements
    return bool(lies.is_shard()) and lies.dim % x.ndim != x.ndim - 1
