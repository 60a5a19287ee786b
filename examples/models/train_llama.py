# SPDX-License-Identifier: MIT
"""Train a Llama by a parallel plan: a model of transformers, its layers split over the ranks, parameters in float32.

    pip install transformers
    tilescale run -n 2 examples/models/train_llama.py        # also without GPUs, emulated

The idea: the plan is PyTorch's, the model is that of transformers. `ops.parallelize_module` takes both, and replaces
linear layers whose communication can be overlapped by TileScale's. Tokens are split over the ranks between the layers,
so norms and residuals are computed once, not on every rank. Parameters stay in float32; autocast computes in bfloat16.

Every step's loss is compared with that of the whole model on this rank alone.

Things to try: another number of ranks; `keep_gathered=True`; FSDP2 over a second dimension of the mesh;
`layer.compile()` for each layer.
"""

import copy

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from transformers import LlamaConfig, LlamaForCausalLM

import tilescale
from tilescale import ops

SPLIT, WHOLE = Shard(1), Replicate()
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel(output_layouts=SPLIT)
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=SPLIT),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": SPLIT}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
    ),
    "model.layers.*.self_attn.[qkv]_proj": COLUMNS,
    "model.layers.*.self_attn.o_proj": ROWS,
    "model.layers.*.post_attention_layernorm": SequenceParallel(),
    "model.layers.*.mlp": PrepareModuleInput(input_layouts=SPLIT, desired_input_layouts=WHOLE),
    "model.layers.*.mlp.gate_proj": COLUMNS,
    "model.layers.*.mlp.up_proj": COLUMNS,
    "model.layers.*.mlp.down_proj": ROWS,
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=SPLIT, output_layouts=WHOLE),
}


def llama(device: torch.device) -> LlamaForCausalLM:
    """Build a small model, the same on each rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def train(model: nn.Module, numbers: torch.Tensor, steps: int) -> list[float]:
    """Return the loss of each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    positions = torch.arange(numbers.shape[1] - 1, device=numbers.device)[None]  # a rank sees a part of the tokens
    for _ in range(steps):
        with torch.autocast(numbers.device.type, torch.bfloat16):
            logits = model(numbers[:, :-1], position_ids=positions, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), numbers[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@click.command()
@click.option("--tokens", default=16, show_default=True, help="Of a sequence, a multiple of the ranks.")
@click.option("--steps", default=5, show_default=True)
def main(tokens: int, steps: int) -> None:
    """Train the whole model and the parallel one, and compare."""
    world = tilescale.init()
    dist.init_process_group("nccl" if world.device.type == "cuda" else "gloo")
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    model = llama(world.device)
    numbers = torch.randint(64, (2, tokens + 1), generator=torch.Generator().manual_seed(1)).to(world.device)
    want = train(copy.deepcopy(model), numbers, steps)
    got = train(ops.parallelize_module(model, mesh["tp"], PLAN), numbers, steps)
    if world.rank == 0:
        print("whole   ", *(f"{loss:.3f}" for loss in want))
        print("parallel", *(f"{loss:.3f}" for loss in got))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=0)
    assert got[-1] < got[0]
    print(f"rank {world.rank}: right")


if __name__ == "__main__":
    main()
