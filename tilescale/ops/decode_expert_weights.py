# SPDX-License-Identifier: MIT
"""Experts of models of transformers for a decode step: what is supported, and their weights, of all layers together."""

from typing import Any

import torch

from tilescale.ops.decode_sizes import DEPTH, LayerSizes

MODELS = ("qwen3_moe", "mixtral")
"""Supported types of models with experts, by the names of transformers."""

MOST_EXPERTS = 256
"""Experts of a layer, at most: a tile has the weights of the router of all of them."""

PART = DEPTH // 2
"""A rank's features of an expert are a multiple of it."""

Wrong = tuple[Any, str, str]
"""Whether something is not supported, what was found, and what is supported."""


def wrong_experts(layers: Any, config: Any, size: int) -> list[Wrong]:
    """Checks of the experts of decoder layers that some ranks share."""
    without = [i for i, layer in enumerate(layers) if not hasattr(getattr(layer.mlp, "experts", None), "gate_up_proj")]
    if without:
        return [(True, f"layer {without[0]} has no experts with gate_up_proj", "experts in every layer, in one tensor")]
    experts, inner = len(layers[0].mlp.gate.weight), inner_of(config)
    dtype = layers[0].mlp.experts.gate_up_proj.dtype
    return [
        (dtype != torch.bfloat16, f"experts are {dtype}", "torch.bfloat16"),
        (experts > MOST_EXPERTS, f"there are {experts} experts", f"up to {MOST_EXPERTS}"),
        (inner % (size * PART), f"experts have {inner} features", f"multiples of {size * PART}"),
        (config.hidden_size % DEPTH, f"hidden_size is {config.hidden_size}", f"multiples of {DEPTH}"),
    ]


def inner_of(config: Any) -> int:
    """Features of an expert."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def experts_of(layers: Any, config: Any) -> dict[str, Any]:
    """The fields of `LayerSizes` for experts."""
    experts, normalizes = len(layers[0].mlp.gate.weight), getattr(config, "norm_topk_prob", True)
    return {"experts": experts, "choices": config.num_experts_per_tok, "normalizes": normalizes}


def stacked_experts(layers: Any, sizes: LayerSizes, rank: int) -> dict[str, torch.Tensor]:
    """Weights of all layers, by the program's parameters; those that no other rank shares become views of them."""
    s, like = sizes, layers[0].mlp.gate.weight
    found = {
        "router": like.new_zeros(s.layers, s.scores, s.hidden),
        "Wup": like.new_empty(s.layers, s.experts, 2 * s.inner, s.hidden),
        "Wdown": like.new_empty(s.layers, s.experts, s.hidden, s.inner),
    }
    for number, layer in enumerate(layers):
        experts, router = layer.mlp.experts, found["router"][number, : s.experts]
        given = (layer.mlp.gate.weight, router), (experts.gate_up_proj, found["Wup"][number])
        for parameter, mine in (*given, (experts.down_proj, found["Wdown"][number])):
            mine.copy_(_part(parameter, mine, rank))
            if parameter.shape == mine.shape:
                parameter.data = mine
    return found


def _part(x: torch.Tensor, mine: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's part of weights that are whole, or have this part already: of gate and up each, or of down."""
    if x.shape == mine.shape:
        return x
    experts, outputs, inputs = mine.shape
    if inputs != x.shape[2]:
        return x[..., rank * inputs : (rank + 1) * inputs]
    return x.view(experts, 2, -1, outputs // 2, inputs)[:, :, rank].flatten(1, 2)
