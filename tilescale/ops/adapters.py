# SPDX-License-Identifier: MIT
"""Adapters of PEFT, such as LoRA, around layers whose weights are split over the ranks: an error.

An adapter takes the shard for the whole layer. It would add to each rank's part of a sum, and each rank would train
another adapter, in silence.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tilescale.errors import ArgumentError


@cache
def refuse_adapters(kind: type[nn.Module]) -> None:
    """Let modules of PEFT raise ArgumentError, in this process, when they become adapters of layers of a kind."""

    def refuse(parent: nn.Module, name: str, module: Any) -> None:
        if isinstance(module, kind) and name == "base_layer" and type(parent).__module__.startswith("peft."):
            raise ArgumentError(
                f"an adapter of PEFT, {type(parent).__name__}, around a layer that is split over the ranks",
                hint="leave the layer out of the adapter's target_modules or of the plan",
            )

    register_module_module_registration_hook(refuse)
