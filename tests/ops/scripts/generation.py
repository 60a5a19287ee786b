# SPDX-License-Identifier: MIT
"""A small Llama of transformers whose tokens are split over two ranks, in any number: logits, gradients, `generate`."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from transformers import LlamaConfig, LlamaForCausalLM

import tilescale
from tilescale import ops

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}

SPLIT, WHOLE, LAYER = Shard(1), Replicate(), "model.layers.*."


def given(**names: object) -> RowwiseParallel:
    """A style whose result is a DTensor: the model asks for its number of tokens."""
    return RowwiseParallel(output_layouts=SPLIT, use_local_output=False, **names)


PLAN = {
    "model.embed_tokens": given(input_layouts=WHOLE),
    f"{LAYER}input_layernorm": SequenceParallel(),
    f"{LAYER}self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": SPLIT}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
    ),
    f"{LAYER}self_attn.[qkv]_proj": ColwiseParallel(),
    f"{LAYER}self_attn.o_proj": given(),
    f"{LAYER}post_attention_layernorm": SequenceParallel(),
    f"{LAYER}mlp": PrepareModuleInput(input_layouts=SPLIT, desired_input_layouts=WHOLE),
    f"{LAYER}mlp.gate_proj": ColwiseParallel(),
    f"{LAYER}mlp.up_proj": ColwiseParallel(),
    f"{LAYER}mlp.down_proj": given(),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=SPLIT, output_layouts=WHOLE),
}


def numbers(tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0.04 * float(want.detach().abs().max()))


def check_logits_and_gradients(plain: nn.Module, model: nn.Module) -> None:
    for tokens, batch in ((1, 2), (3, 2), (4, 1)):
        x = numbers(tokens, batch)
        for each in (plain, model):
            each.zero_grad()
            each(x).logits.float().pow(2).sum().backward()
        near(model(x).logits, plain(x).logits)
        for name, parameter in plain.named_parameters():
            near(model.get_parameter(name).grad.full_tensor(), parameter.grad)


def check_generate(plain: nn.Module, model: nn.Module) -> None:
    for tokens in (1, 3):
        how = {"max_new_tokens": 3, "do_sample": False}
        assert model.generate(numbers(tokens), **how).equal(plain.generate(numbers(tokens), **how))


if __name__ == "__main__":
    world = tilescale.init()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().eval()
    model = ops.parallelize_module(copy.deepcopy(plain), init_device_mesh("cpu", (world.size,)), PLAN)
    (layer,) = model.model.layers
    assert isinstance(layer.self_attn.q_proj, ops.ColumnParallelLinear)
    assert isinstance(layer.mlp.down_proj, ops.RowParallelLinear)
    check_logits_and_gradients(plain, model)
    check_generate(plain, model)
    print("passed", flush=True)
