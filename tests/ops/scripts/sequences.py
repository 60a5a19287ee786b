# SPDX-License-Identifier: MIT
"""Tokens that are split over two ranks, in any number, and of any number of sequences.

A small Llama of transformers has the logits and gradients of the whole one, and generates the same. A pair of layers
copies of several sequences what enters it, once a pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import tilescale
from tilescale import ops
from tilescale.ops.operator import operator_of

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


def check_graphs(plain: nn.Module, model: nn.Module) -> None:
    """The whole model as a graph for each number of tokens, and its layers as graphs for any number."""
    compare(plain, model, torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager"), (4, 5))
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    compare(plain, model, model, (4, 6, 5))


def compare(plain: nn.Module, model: nn.Module, compiled: nn.Module, counts: tuple[int, ...]) -> None:
    """Logits and gradients are those of the whole model."""
    for tokens in counts:
        results = [each(numbers(tokens), use_cache=False).logits for each in (compiled, plain)]
        near(*results)
        for each, result in zip((model, plain), results, strict=True):
            each.zero_grad()
            result.float().pow(2).sum().backward()
        for name, parameter in plain.named_parameters():
            near(model.get_parameter(name).grad.full_tensor(), parameter.grad)


class Copies(TorchDispatchMode):
    """Counts copies of tensors, also those inside of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        if space == "tilescale":
            with self:
                return operator_of(name).function(*args)
        made = func(*args, **(kwargs or {}))
        if name.partition(".")[0] in ("reshape", "flatten", "contiguous"):  # below autograd they are one operation
            self.number += made.data_ptr() != args[0].data_ptr()
        self.number += name.partition(".")[0] in ("clone", "copy_", "cat", "_to_copy")
        return made


def copies(x: torch.Tensor, grad: torch.Tensor) -> tuple[int, int]:
    """Number of copies in forward and backward of a gated MLP, for this rank's tokens and the result's gradient."""
    sizes = SIZES["hidden_size"], SIZES["intermediate_size"]
    gate, up, down = (nn.Linear(*each, bias=False).bfloat16() for each in (sizes, sizes, sizes[::-1]))
    for layer in (gate, up):
        ops.ColumnParallelLinear.shard(layer)
    ops.RowParallelLinear.shard(down)
    ops.gather_once(gate, up)
    x = x.detach().requires_grad_()
    with Copies() as forward:
        y = down(nn.functional.silu(gate(x)) * up(x))
    with Copies() as backward:
        torch.autograd.grad(y, (x, gate.weight, up.weight, down.weight), grad)
    return forward.number, backward.number


def check_copies() -> None:
    one, several = (torch.randn(batch, 4, SIZES["hidden_size"]).bfloat16() for batch in (1, 3))
    least = copies(one, one)
    assert copies(several, several) == (least[0] + 1, least[1] + 1)
    token_major = several.transpose(0, 1).contiguous().transpose(0, 1)
    assert copies(token_major, token_major) == least, "tokens are outermost in memory already"


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
    check_copies()
    check_graphs(plain, model)
    print("passed", flush=True)
