# SPDX-License-Identifier: MIT
"""A decode step over two ranks, each with half of the heads and of the MLP or the experts: the whole model's logits."""

from typing import Any

import torch
import transformers

import tilescale
from tilescale import ops

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 128, "num_hidden_layers": 2, "vocab_size": 48, "initializer_range": 0.1}
WORLD = tilescale.init()


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def main() -> None:
    compare(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES), (2, 256, 256))
    compare(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**SIZES, **EXPERTS), (2, 4, 128, 256))
    print(f"passed on rank {WORLD.rank}", flush=True)


@torch.no_grad()
def compare(kind: Any, config: Any, part: tuple[int, ...]) -> None:
    """The logits of one step with those of the model; `part` is the extents of a rank's weights of gate and up."""
    torch.manual_seed(0)
    model = kind(config).bfloat16().eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (3, 6), generator=torch.Generator().manual_seed(1))
    made = model(tokens[:, :5], use_cache=True).past_key_values
    step = ops.DecodeStep(model, 3, 64, schedule="sequential")
    assert step.Wup.shape == part, "gate and up, half of each"
    step.load(made)
    found = step(tokens[:, 5])
    want = model(tokens[:, 5:], past_key_values=made).logits[:, 0].float()
    assert (found - want).norm() < 0.02 * want.norm()


if __name__ == "__main__":
    main()
