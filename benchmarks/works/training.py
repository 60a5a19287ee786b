# SPDX-License-Identifier: MIT
"""Training steps of blocks of Llama 3 8B over the GPUs, by a plan with PyTorch's layers, and with TileScale's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import trials
from torch import nn
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

HIDDEN, HEADS, OF_KEYS, INNER, BLOCKS = 4096, 32, 8, 14336, 2
DIM = HIDDEN // HEADS
SEED = 7


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Tokens of all GPUs x features x blocks."""
    if gpus == 1 or quick:
        return
    for tokens in (4096, 8192):
        work = Step(tokens)
        entries = [
            Contender("torch", work.torch),
            Contender("tilescale", work.ours, lambda work=work: work.ours().call()),
            Contender("tilescale, float8", work.float8, lambda work=work: work.float8().call()),
        ]
        yield Heat("training_step", (tokens, HIDDEN, BLOCKS), "bfloat16", gpus, "eager", "torch", entries, calls=3)


class Attention(nn.Module):
    """Causal attention of this rank's heads, over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(HIDDEN, OF_KEYS * DIM, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, tokens, features) of all tokens."""
        q, k, v = (w(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, tokens, features) of all tokens."""
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, tokens, features) of the local tokens."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def plan() -> dict[str, Any]:
    """Plan of torchtitan for Llama: tokens are split over the ranks between the layers of a block."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    found: dict[str, Any] = {}
    for norm, part, columns, rows in (
        ("attention_norm", "attention", "w[qkv]", "wo"),
        ("ffn_norm", "feed_forward", "w[13]", "w2"),
    ):
        found[f"*.{norm}"] = SequenceParallel()
        found[f"*.{part}"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        found[f"*.{part}.{columns}"] = ColwiseParallel()
        found[f"*.{part}.{rows}"] = RowwiseParallel(output_layouts=Shard(1))
    return found


class Step:
    """Forward, backward and the optimiser of some blocks; each rank has its part of the tokens."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def draw(self, seed: int, bounds: tuple[float, float] = (2.0**-5, 2.0**-4)) -> Case:
        """Local tokens; the blocks' results on one GPU, and their gradients.

        `bounds`: error bounds of both, relative to their magnitudes, or to one.
        """
        whole = torch.randn(1, self.tokens, HIDDEN, generator=self.generator(seed), device=trials.device()).bfloat16()
        results = [self.mine(x).float() for x in forth_and_back(self.model(), whole.requires_grad_())]
        bound = [share * x.abs().clamp(min=1) for share, x in zip(bounds, results, strict=True)]
        return Case((self.mine(whole.detach()),), torch.stack(results), torch.stack(bound))

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    def generator(self, seed: int) -> torch.Generator:
        """A random number generator with the same seed on all ranks."""
        return torch.Generator(trials.device()).manual_seed(seed)

    def model(self) -> nn.Sequential:
        """The whole model, the same each time."""
        made = self.generator(SEED)
        with torch.device(trials.device()):
            model = nn.Sequential(*(Block() for _ in range(BLOCKS))).bfloat16()
        for weight in model.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=HIDDEN**-0.5 / 2, generator=made)
        return model

    def torch(self) -> Runner:
        """PyTorch's layers."""
        from torch.distributed.tensor.parallel import parallelize_module

        return self._runner(parallelize_module)

    def ours(self) -> Runner:
        """Our layers, by the same plan."""
        from tilescale import ops

        return self._runner(ops.parallelize_module)

    def float8(self) -> Runner:
        """TileScale's layers with GEMMs in float8, with a wider error bound."""
        from tilescale import ops

        rounded = functools.partial(ops.parallelize_module, float8=ops.Float8())
        return self._runner(rounded, functools.partial(self.draw, bounds=(2.0**-2, 2.0**-1)))

    def _runner(self, parallelize: Callable[..., nn.Module], draw: trials.Draw | None = None) -> Runner:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(trials.device().type, (tilescale.init().size,))
        model = parallelize(self.model(), mesh, plan())
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-9)  # too small for contenders to diverge
        x = trials.nothing(1, self.tokens // mesh.size(), HIDDEN).requires_grad_()

        def step() -> torch.Tensor:
            results = forth_and_back(model, x)
            optimiser.step()
            optimiser.zero_grad()
            return torch.stack(results)

        return checked(draw or self.draw, torch.no_grad()(trials.into(x)), step)


def forth_and_back(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of a model for x, and the gradient of x if the loss is half of the sum of the squares."""
    x.grad = None
    y = model(x)
    y.float().pow(2).sum().mul(0.5).backward()
    assert x.grad is not None
    return y.detach(), x.grad
