# SPDX-License-Identifier: MIT
"""Models of transformers with experts split over the ranks, compared with the same models on each rank alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import FP8Experts

import tilescale
from tests.ops.float8_experts import near as float64_near
from tests.ops.float8_experts import random_expert, wanted
from tilescale import ops
from tilescale.errors import ArgumentError

WORLD = tilescale.init()
RANK, SIZE = WORLD.rank, WORLD.size

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
ADDED = {
    "Mixtral": {"num_local_experts": 2 * SIZE},
    "Qwen3Moe": {"num_experts": 2 * SIZE, "head_dim": 16, "norm_topk_prob": True},
    "DeepseekV3": {"n_routed_experts": 4 * SIZE, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
}


def near(got: torch.Tensor, want: torch.Tensor, most: float = 0.03) -> None:
    error = (got.float() - want.float()).norm()
    assert error <= most * want.float().norm() + 1e-6, (error, want.float().norm())


def check(name: str) -> None:
    """Logits of local tokens; gradients of experts of all tokens, of other parameters of local ones."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **ADDED[name])
    alone = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
    for parameter in alone.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    shared = ops.parallelize_experts(copy.deepcopy(alone))
    tokens = torch.randint(0, 50, (SIZE, 1, 6))
    grads = torch.randn(SIZE, 1, 6, 50)
    got = shared(tokens[RANK]).logits
    (got.float() * grads[RANK]).sum().backward()
    for rank in sorted(range(SIZE), key=lambda r: r == RANK):  # own tokens last
        mine = {key: p.grad for key, p in alone.named_parameters()} if rank == RANK else {}
        kept = {key: None if g is None else g.clone() for key, g in mine.items()}
        want = alone(tokens[rank]).logits
        (want.float() * grads[rank]).sum().backward()
    near(got, want)
    for key, parameter in shared.named_parameters():
        whole = alone.get_parameter(key).grad
        if ".experts." in key:
            near(parameter.grad, whole.chunk(SIZE)[RANK])
        elif whole is not None:
            near(parameter.grad, whole - (0 if kept[key] is None else kept[key]), 0.06)
    if RANK == 0:
        print(f"passed {name}", flush=True)


def check_float8() -> None:
    """The experts of float8 checkpoints, in a block by themselves, compared with float64."""
    config = transformers.DeepseekV3Config(hidden_size=128, moe_intermediate_size=128, n_routed_experts=2 * SIZE)
    config.num_local_experts = 2 * SIZE
    block = torch.nn.ModuleDict({"experts": FP8Experts(config, block_size=(128, 128))})
    generator = torch.Generator().manual_seed(0)
    experts = [random_expert(128, 128, generator=generator) for _ in range(2 * SIZE)]
    named = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
    for name, whole in zip(named, zip(*experts, strict=True), strict=True):
        block["experts"].get_parameter(name).data.copy_(torch.stack(whole))
    shared = ops.parallelize_experts(block, room=2 * 128)["experts"]
    x, weights, chosen = torch.randn(5, 128).bfloat16(), *torch.rand(5, 2 * SIZE).topk(2)
    with torch.no_grad():
        float64_near("float8 experts", shared(x, chosen, weights), wanted(x, chosen, weights, experts))
    assert set(dict(shared.named_parameters())) == set(named)
    assert shared.dropped.tolist() == [0, 0]
    if RANK == 0:
        print("passed FP8Experts", flush=True)
    with pytest.raises(ArgumentError, match="has no experts"):
        ops.parallelize_experts(torch.nn.ModuleDict({"experts": FP8Experts(config, block_size=(64, 128))}))


def check_training_in_float8() -> None:
    """Logits and gradients as those of bfloat16, except for rounding; the same again as of one layer of experts."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128}
    alone = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **ADDED["Mixtral"])).bfloat16()
    recipe = ops.Float8("blockwise", torch.bfloat16)
    models = [
        ops.parallelize_experts(copy.deepcopy(alone), **options)
        for options in ({}, {"float8": recipe}, {"float8": recipe, "wire": "float8_e4m3fn"})
    ]
    tokens = torch.randint(0, 50, (SIZE, 1, 6))
    plain, *others = (model(tokens[RANK]).logits for model in models)
    for logits in (plain, *others):
        logits.float().square().sum().backward()
    for model, logits in zip(models[1:], others, strict=True):
        assert not torch.equal(logits, plain)
        near(logits, plain, 0.06)
        for key, parameter in model.named_parameters():
            if ".experts." in key:
                near(parameter.grad, models[0].get_parameter(key).grad, 0.1)
    if RANK == 0:
        print("passed Float8", flush=True)


for each in ADDED:
    check(each)
check_float8()
check_training_in_float8()
with pytest.raises(ArgumentError, match="has no experts"):
    ops.parallelize_experts(torch.nn.Linear(8, 8))
