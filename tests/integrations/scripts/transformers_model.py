# SPDX-License-Identifier: MIT
"""Small models of transformers, loaded from disk with plans that name TileScale's styles, against whole ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.distributed import DistributedConfig

import tilescale
from tilescale.ops import transformers_styles
from tilescale.ops.linear import ColumnParallelLinear, RowParallelLinear

WORLD = tilescale.init()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))


def plan(config: Any) -> dict[str, str]:
    """Plan of the model, with TileScale's styles."""
    given = config.base_model_tp_plan.items()
    return {f"model.{name}": f"tilescale_{style}" for name, style in given if style in ("colwise", "rowwise")}


def saved(config: Any, folder: Path) -> Any:
    """A random model, the same on each rank, in a folder of rank 0's."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    if WORLD.rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def loss(model: Any) -> torch.Tensor:
    return model(TOKENS, labels=TOKENS).loss


def check(config: Any, folder: Path) -> None:
    """Logits, gradients, generated tokens, and what is saved again."""
    whole = saved(config, folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=WORLD.size, tp_plan=plan(config))
    )
    kinds = [type(layer) for layer in model.modules()]
    assert kinds.count(ColumnParallelLinear) == 2 * 5 and kinds.count(RowParallelLinear) == 2 * 2, set(kinds)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, whole(TOKENS).logits, rtol=2e-2, atol=2e-2)
    for each in model, whole:
        each.train()
        loss(each).backward()
    grads = dict(model.named_parameters())
    for name, p in whole.named_parameters():
        mine = grads[name].grad
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(mine, p.grad, rtol=5e-2, atol=3e-2 * float(p.grad.abs().max()), msg=name)
    model.eval(), whole.eval()
    wanted = whole.generate(TOKENS, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=6, do_sample=False), wanted)
    again = folder / "again"
    model.save_pretrained(again)
    dist.barrier()
    kept = AutoModelForCausalLM.from_pretrained(again).state_dict()
    assert all(torch.equal(x, kept[name]) for name, x in whole.state_dict().items())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    transformers_styles.register()
    folder = Path(WORLD.broadcast(tempfile.mkdtemp() if WORLD.rank == 0 else None))
    check(LlamaConfig(**SIZES), folder / "llama")
    check(Qwen2Config(**SIZES), folder / "qwen")  # biases of q, k, v
    print("passed", flush=True)
    dist.destroy_process_group()
