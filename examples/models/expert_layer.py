# SPDX-License-Identifier: MIT
"""Expert parallelism: tokens of all ranks go to the experts that they choose, on any rank, and back.

    tilescale run -n 2 examples/models/expert_layer.py       # also without GPUs, emulated

The idea: every rank has some of the experts, and all of the router. `ops.moe_layer` dispatches tokens to their experts,
on any rank, and combines the results into weighted sums. It is differentiable, and the host never synchronizes: the
token counts stay on the device.

Results and gradients are compared with those of all experts on one rank.

Things to try: `room=` for fewer rows, which drops tokens; all tokens to one expert; for experts of another kind the
parts of the layer, `ops.moe_route`, `ops.moe_dispatch`, `ops.grouped_matmul` and `ops.moe_combine`.
"""

import click
import torch
import torch.distributed as dist
from torch import nn

import tilescale
from tilescale import ops


class ExpertLayer(nn.Module):
    """SwiGLU experts, of which this rank has a part."""

    def __init__(self, features: int, inner: int, experts: int, choices: int):
        super().__init__()
        world = tilescale.init()
        local = slice(world.rank * experts // world.size, (world.rank + 1) * experts // world.size)
        self.choices = choices
        self.router = nn.Parameter(torch.randn(experts, features) * features**-0.5)
        self.up = nn.Parameter((torch.randn(experts, 2 * inner, features) * features**-0.5)[local].clone())
        self.down = nn.Parameter((torch.randn(experts, features, inner) * inner**-0.5)[local].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, features) of this rank."""
        share, chosen = choose(x, self.router, self.choices)
        return ops.moe_layer(x, (chosen, share), self.up, self.down)


def choose(x: torch.Tensor, router: torch.Tensor, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each token's experts, and their indices."""
    share, chosen = (x @ router.t()).float().softmax(-1).topk(choices)
    return (share / share.sum(-1, keepdim=True)).to(x.dtype), chosen


def dense(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor, choices: int) -> torch.Tensor:
    """Compute the same on one rank, with all experts for all tokens, in float32."""
    share, chosen = choose(x, router, choices)
    weights = torch.zeros(len(x), len(up), device=x.device).scatter(1, chosen, share.float())
    gate, value = torch.einsum("tk,enk->etn", x.float(), up.float()).chunk(2, -1)
    made = torch.einsum("etn,ekn->etk", nn.functional.silu(gate) * value, down.float())
    return torch.einsum("etk,te->tk", made, weights)


@click.command()
@click.option("--tokens", default=24, show_default=True, help="Of each rank.")
@click.option("--experts", default=4, show_default=True, help="Of all ranks, a multiple of these.")
def main(tokens: int, experts: int) -> None:
    """Run the layer forward and backward, and compare."""
    world = tilescale.init()
    dist.init_process_group("nccl" if world.device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layer = ExpertLayer(64, 128, experts, choices=2).to(world.device).bfloat16()
    whole = torch.randn(world.size * tokens, 64).to(world.device).bfloat16()
    x = whole.chunk(world.size)[world.rank].clone().requires_grad_()
    y = layer(x)
    y.float().pow(2).sum().backward()

    up, down = (ops.all_gather(part.detach()) for part in (layer.up, layer.down))
    given = whole.clone().requires_grad_()
    want = dense(given, layer.router.detach(), up, down, layer.choices)
    want.pow(2).sum().backward()
    for name, got, full in (("result", y, want), ("gradient", x.grad, given.grad)):
        part = full.detach().float().chunk(world.size)[world.rank]
        error = float((got.detach().float() - part).abs().max() / part.abs().max())
        assert error < 0.03, (name, error)
        if world.rank == 0:
            print(f"{name}: largest error {error:.1e} of the largest element")
    print(f"rank {world.rank}: right")


if __name__ == "__main__":
    main()
