# SPDX-License-Identifier: MIT
"""Published models as stacks of a few decoder layers of `transformers`, with random weights and their real sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 7
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Family:
    """A model of `transformers`.

    Attributes:
        name: of the works.
        kind: its configuration's class.
        sizes: the configuration's arguments.
        norms: of a layer, in front of attention and MLP.
        closing: norms after them, whose results are added to the residual.
        experts: whether its MLP is one of experts.
    """

    name: str
    kind: str
    sizes: tuple[tuple[str, Any], ...]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    closing: tuple[str, ...] = ()
    experts: bool = False

    @property
    def config(self) -> Any:
        import transformers

        given = {name: list(x) if isinstance(x, tuple) else x for name, x in self.sizes}
        given |= {"vocab_size": 256, "pad_token_id": 0, "attn_implementation": "sdpa"}
        return getattr(transformers, self.kind)(max_position_embeddings=8192, **given)

    @property
    def hidden(self) -> int:
        """Number of features between layers."""
        return int(dict(self.sizes)["hidden_size"])

    @property
    def layers(self) -> int:
        """Number of layers of the stack."""
        return int(dict(self.sizes)["num_hidden_layers"])

    def stack(self, tokens: int | None, device: torch.device) -> Stack:
        """The layers in bfloat16, the same weights each time on each rank; without `tokens` for any number of them."""
        generator = torch.Generator(device).manual_seed(SEED)
        with torch.device(device):
            model = Stack(self.config, tokens).bfloat16()
        for weight in model.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=self.hidden**-0.5 / 2, generator=generator)
        return model

    def plan(self, sequence: bool) -> dict[str, Any]:
        """Plan of torchtitan for Llama, without the MLP of experts; `sequence`: tokens are split over the ranks."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
        )

        columns, rows = ([name for name in names if not (self.experts and "mlp" in name)] for names in (COLUMNS, ROWS))
        found: dict[str, Any] = {f"layers.*.{name}": ColwiseParallel() for name in columns}
        if not sequence:
            return found | {f"layers.*.{name}": RowwiseParallel() for name in rows}
        split, whole = Shard(1), Replicate()
        found |= {f"layers.*.{name}": RowwiseParallel(output_layouts=split) for name in rows}
        found |= {f"layers.*.{name}": SequenceParallel() for name in self.norms}
        found |= {f"layers.*.{name}": SequenceParallel(use_local_output=True) for name in self.closing}
        found["layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        inside = {"desired_input_layouts": split if self.experts else whole, "use_local_output": self.experts}
        found["layers.*.mlp"] = PrepareModuleInput(input_layouts=split, **inside)
        return found


class Stack(nn.Module):
    """Decoder layers of a model, applied to embedded tokens."""

    def __init__(self, config: Any, tokens: int | None):
        from transformers import AutoModel

        super().__init__()
        base = AutoModel.from_config(config)
        self.layers, self.rotary, self.tokens = base.layers, base.rotary_emb, tokens
        self.types = getattr(config, "layer_types", None)
        self.window = getattr(config, "sliding_window", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, features) of this rank's tokens, if they are split over the ranks."""
        positions = torch.arange(x.shape[1] if self.tokens is None else self.tokens, device=x.device)[None]
        angles: dict[Any, Any] = {}
        for layer, kind in zip(self.layers, self._kinds(), strict=True):
            if kind not in angles:
                angles[kind] = self.rotary(x, positions, *([kind] if kind else [])), self._mask(positions, kind)
            position_embeddings, mask = angles[kind]
            x = layer(x, position_embeddings=position_embeddings, attention_mask=mask)
        return x

    def _kinds(self) -> list[str | None]:
        """Key of rotary embeddings; None where all layers have the same."""
        several = self.types is not None and len(set(self.types)) > 1
        return list(self.types) if several else [None] * len(self.layers)

    def _mask(self, positions: torch.Tensor, kind: str | None) -> torch.Tensor | None:
        """(1, 1, tokens, tokens) where a layer sees the last tokens alone; None: all earlier ones."""
        if kind != "sliding_attention" or self.window is None or positions.shape[1] <= self.window:
            return None
        distance = positions[0][:, None] - positions[0][None]
        return ((distance >= 0) & (distance < self.window))[None, None]


def _sizes(hidden: int, inner: int, heads: int, keys: int, layers: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    given = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "head_dim": 128}
    return tuple((given | {"num_key_value_heads": keys, "num_hidden_layers": layers} | more).items())


LLAMA = Family("llama3_8b", "LlamaConfig", _sizes(4096, 14336, 32, 8, 4))
QWEN = Family("qwen3_14b", "Qwen3Config", _sizes(5120, 17408, 40, 8, 2))
GEMMA = Family(
    "gemma3_27b", "Gemma3TextConfig",
    _sizes(5376, 21504, 32, 16, 2, query_pre_attn_scalar=168, layer_types=("sliding_attention", "full_attention")),
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    closing=("post_attention_layernorm", "post_feedforward_layernorm"),
)  # fmt: skip
MIXTRAL = Family("mixtral_8x7b", "MixtralConfig", _sizes(4096, 14336, 32, 8, 1, sliding_window=None), experts=True)
QWEN_MOE = Family(
    "qwen3_30b_a3b", "Qwen3MoeConfig",
    _sizes(2048, 6144, 32, 4, 2, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    experts=True,
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN, GEMMA, MIXTRAL, QWEN_MOE)
