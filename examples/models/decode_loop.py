# SPDX-License-Identifier: MIT
"""Decode in a CUDA graph: token by token, each layer's weights and heads split over the ranks.

    tilescale run -n 2 examples/models/decode_loop.py        # also without GPUs, emulated, without the graph

The idea: every decode step launches the same kernels, so it is captured once and replayed. Tokens and position are
tensors that change in place. Every rank has all tokens between the layers; a layer ends with an all-reduce, which is
overlapped with the GEMM before it. CUDA graphs capture operators of TileScale like those of PyTorch.

Tokens are compared with those that the whole model chooses on this rank alone.

Things to try: more sequences at once; `float8=ops.Float8()`; `layer.compile()` before the capture.
"""

import copy
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import tilescale
from tilescale import ops

HIDDEN, HEADS, LAYERS, VOCABULARY, ROOM = 64, 4, 2, 48, 32
PLAN = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("o", "down")},
}


class Layer(nn.Module):
    """Attention to all tokens so far, and an MLP; with keys and values of this rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.attention_norm, self.norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def make_room(self, batch: int, heads: int) -> None:
        """Allocate the cache of keys and values."""
        like = self.norm.weight
        self.keys, self.values = (like.new_zeros(batch, heads, ROOM, HIDDEN // HEADS) for _ in range(2))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return (batch, 1, features) of the token at a position."""
        given = self.attention_norm(x)
        q, k, v = (w(given).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(ROOM, device=x.device) <= position
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None, None, None])
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the most likely next tokens, (batch, 1)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(x).argmax(-1)


def replayed(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph; return the step itself where there is no GPU."""
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # kernels are compiled and loaded before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def decode(model: Decoder, first: torch.Tensor, count: int, heads: int) -> torch.Tensor:
    """Generate `count` tokens after the first ones, (batch, count)."""
    for layer in model.layers:
        layer.make_room(len(first), heads)
    tokens, position = first.clone(), torch.zeros(1, dtype=torch.int64, device=first.device)

    def step() -> None:
        tokens.copy_(model(tokens, position))
        position.add_(1)

    run, made = replayed(step), []
    tokens.copy_(first)
    position.zero_()
    for _ in range(count):
        run()
        made.append(tokens.clone())
    return torch.cat(made, 1)


@click.command()
@click.option("--batch", default=2, show_default=True, help="Sequences.")
@click.option("--count", default=8, show_default=True, help="Tokens to decode.")
def main(batch: int, count: int) -> None:
    """Decode with the whole model and with the parallel one, and compare."""
    world = tilescale.init()
    dist.init_process_group("nccl" if world.device.type == "cuda" else "gloo")
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Decoder().to(world.device).bfloat16().eval()
    first = torch.arange(batch, device=world.device)[:, None]
    want = decode(copy.deepcopy(model), first, count, HEADS)
    parallel = ops.parallelize_module(model, mesh["tp"], PLAN)
    got = decode(parallel, first, count, HEADS // world.size)
    if world.rank == 0:
        print(got.tolist())
    assert torch.equal(got, want), want
    print(f"rank {world.rank}: right")


if __name__ == "__main__":
    main()
