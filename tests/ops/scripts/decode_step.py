# SPDX-License-Identifier: MIT
"""A decode step over two ranks, each with half of the heads and of the MLP: the logits of the whole model."""

import torch
import transformers

import tilescale
from tilescale import ops

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 128, "num_hidden_layers": 2, "vocab_size": 48, "initializer_range": 0.1}
WORLD = tilescale.init()


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).bfloat16().eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (3, 6), generator=torch.Generator().manual_seed(1))
    made = model(tokens[:, :5], use_cache=True).past_key_values
    step = ops.DecodeStep(model, 3, 64, schedule="sequential")
    assert step.Wup.shape == (2, 256, 256), "gate and up, half of each"
    step.load(made)
    found = step(tokens[:, 5])
    want = model(tokens[:, 5:], past_key_values=made).logits[:, 0].float()
    assert (found - want).norm() < 0.02 * want.norm()
    print(f"passed on rank {WORLD.rank}", flush=True)


if __name__ == "__main__":
    main()
