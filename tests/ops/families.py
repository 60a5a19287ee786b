# SPDX-License-Identifier: MIT
"""Small models of transformers with random weights, and plans of PyTorch's styles for them.

A plan follows the model's own one, of transformers' styles, and has no entries for modules that it does not split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

PLANS = ("replicated", "sequence")
"""Plans by the tokens of a rank between layers: all of them, or a part."""
WHOLE, FEATURES, TOKENS = Replicate(), Shard(-1), Shard(1)
PLACEMENTS = {
    "colwise": (ColwiseParallel, WHOLE, FEATURES),
    "colwise_gather_output": (ColwiseParallel, WHOLE, WHOLE),
    "rowwise": (RowwiseParallel, FEATURES, WHOLE),
    "rowwise_split_input": (RowwiseParallel, WHOLE, WHOLE),
    "embedding_rowwise": (RowwiseParallel, WHOLE, WHOLE),
}
"""PyTorch's class for a style of transformers, and the placements of its input and its output."""

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 4,
    "query_pre_attn_scalar": 8, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
    "attn_implementation": "sdpa",
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "num_key_value_heads": 8, "head_dim": 4,
}  # fmt: skip
GPT = {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_inner": 128, "n_positions": 64, "rotary_dim": 8}


@dataclass(frozen=True)
class Family:
    """A class of models.

    Attributes:
        kind: its name in transformers.
        sizes: of its configuration, in addition to those of all.
    """

    kind: str
    sizes: tuple[tuple[str, Any], ...] = ()

    def model(self) -> nn.Module:
        """The same weights each time, of a size that shows in the logits."""
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = CONFIG_MAPPING[self.kind]
        given = {key: x for key, x in (SIZES | EXPERTS | GPT | dict(self.sizes)).items() if hasattr(kind(), key)}
        generator = torch.Generator().manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**given | {"eos_token_id": None}))
        for parameter in model.parameters():
            by = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data = by if parameter.ndim > 1 else parameter.data + by
        return model.eval()

    def styled(self, model: Any) -> Iterator[tuple[str, str]]:
        """Modules that a plan names, with wildcards, and transformers' styles of them."""
        modules, base = dict(model.named_modules()), model.base_model_prefix
        for name, style in model.config.base_model_tp_plan.items():
            found = [each for key, each in modules.items() if is_named(key, f"{base}.{name}")]
            if style in PLACEMENTS and found and all(isinstance(each, nn.Linear | nn.Embedding) for each in found):
                yield f"{base}.{name}", style

    def replicated(self, model: Any) -> dict[str, Any]:
        """Plan of a model whose ranks have all tokens between layers."""
        made: dict[str, Any] = {}
        for name, style in self.styled(model):
            kind, given, result = PLACEMENTS[style]
            made[name] = kind(input_layouts=given, output_layouts=result)
        embedding = model.get_input_embeddings()
        if embedding.weight is model.lm_head.weight:  # which is split as one
            (name,) = (name for name, each in model.named_modules() if each is embedding)
            made[name] = RowwiseParallel(input_layouts=WHOLE, output_layouts=WHOLE)
        return made | {"lm_head": ColwiseParallel(output_layouts=WHOLE)}

    def sequence(self, model: Any) -> dict[str, Any]:
        """Plan of a model whose tokens are split over the ranks between layers, as DTensors: it counts them.

        Attention and MLPs take all tokens, and end with a row-parallel layer; each rank computes all of a block of
        experts, and keeps its tokens of the result.
        """
        patterns, prefix, made = list(self.styled(model)), model.base_model_prefix, {}
        modules = dict(model.get_submodule(prefix).named_modules(prefix=prefix))
        styles = {name: style for pattern, style in patterns for name in modules if is_named(name, pattern)}
        blocks = {block_of(name) for name, style in styles.items() if style.startswith("rowwise")}
        ending = {name for name in blocks if not any("experts" in each for each, _ in modules[name].named_children())}
        for name, module in modules.items():
            if isinstance(module, nn.Embedding):
                made[name] = RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS, use_local_output=False)
            elif name in styles:
                kind, given, result = PLACEMENTS[styles[name]]
                ends = kind is RowwiseParallel and block_of(name) in ending
                how = {"output_layouts": TOKENS, "use_local_output": False} if ends else {"output_layouts": result}
                made[name] = kind(input_layouts=given, **how)
            elif block_of(name) == name and list(module.children()) and list(module.parameters()):
                made[name] = whole_tokens(name, module, name in ending)
            elif name.count(".") in (1, 3) and list(module.parameters(recurse=False)):
                made[name] = SequenceParallel()
        return made | {"lm_head": ColwiseParallel(input_layouts=TOKENS, output_layouts=WHOLE)}


def block_of(name: str) -> str | None:
    """The block of a layer that a module is in, such as `model.layers.0.mlp`, or that it is."""
    return ".".join(name.split(".")[:4]) if name.count(".") >= 3 else None


def whole_tokens(name: str, block: nn.Module, ends: bool) -> Any:
    """A block's style, with its result's unless it ends with a row-parallel layer. transformers call attention by
    names; layers that no style names take local tensors."""
    local = not ends or hasattr(block, "kv_a_proj_with_mqa")
    attention = "att" in name
    if attention and "gpt_neox" not in name:
        given: dict[str, Any] = {
            "input_kwarg_layouts": {"hidden_states": TOKENS}, "desired_input_kwarg_layouts": {"hidden_states": WHOLE}
        }  # fmt: skip
    else:
        given = {"input_layouts": TOKENS, "desired_input_layouts": WHOLE}
    if ends:
        return PrepareModuleInput(**given, use_local_output=local)
    result, wanted = ((WHOLE, None), (TOKENS, None)) if attention else (WHOLE, TOKENS)
    made = {"output_layouts": result, "desired_output_layouts": wanted, "use_local_output": False}
    return PrepareModuleInputOutput(**given, use_local_input=local, **made)


def is_named(name: str, pattern: str) -> bool:
    """Whether a plan's entry names a module."""
    words, wanted = name.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatch, words, wanted))


FAMILIES = {
    each.kind: each
    for each in (
        *map(
            Family,
            "apertus arcee aria_text codegen cohere cohere2 cwm ernie4_5 exaone4 flex_olmo gemma gemma2 "
            "gemma3_text glm glm4 glm4_moe gpt_neox gptj granite helium jais2 llama mistral mixtral nemotron olmo "
            "olmo2 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2".split(),
        ),
        *(Family(kind, tuple(LATENT.items())) for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")),
    )
}
"""Families by their names in transformers."""
