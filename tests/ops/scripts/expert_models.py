# SPDX-License-Identifier: MIT
"""Models of transformers with experts split over the ranks, compared with the same models on each rank alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import tilescale
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


for each in ADDED:
    check(each)
with pytest.raises(ArgumentError, match="has no experts"):
    ops.parallelize_experts(torch.nn.Linear(8, 8))
