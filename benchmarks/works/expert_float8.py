# SPDX-License-Identifier: MIT
"""A layer of float8 experts, as large as DeepSeek-V3's, and its two grouped GEMMs alone.

The GEMMs alone have all tokens in the rows of their experts beforehand, and send nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import trials
from trials import Case, checked

import tilescale
from tilescale import ops
from tilescale.ops import grouped_float8
from tilescale.ops.float8_wire import GROUP
from tilescale.ops.kernels import local_kernel
from tilescale.tuning.race import Contender, Heat, Runner

FEATURES, INNER, LOCAL, CHOICES = 7168, 2048, 32, 8

TOKENS = (16, 64, 128, 4096)

ALONE = "grouped GEMMs alone"

BOUND = 2.0**-4
"""Error bound of elements, relative to the largest: roundings to bfloat16, and of activations to float8."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Tokens of a rank x features x inner x experts."""
    if gpus == 1:
        return
    for tokens in (16,) if quick else TOKENS:
        work, shape = Work(tokens), (tokens, FEATURES, INNER, gpus * LOCAL)
        entries = [Contender(ALONE, work.alone), Contender("tilescale", work.ours)]
        for mode in ("eager", "graph", *(["host"] if tokens == TOKENS[0] else [])):
            flops = tokens * CHOICES * 6 * FEATURES * INNER
            yield Heat("experts forward", shape, "float8_e4m3fn", gpus, mode, ALONE, entries, flops=flops)


@dataclass(frozen=True)
class Work:
    """Forward of a number of tokens a rank."""

    tokens: int

    def inputs(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, their experts and weights."""
        (x,) = trials.randoms(seed, torch.bfloat16, (self.tokens, FEATURES))
        (scores,) = trials.randoms(seed + 100, torch.float32, (self.tokens, LOCAL * tilescale.init().size))
        weights, chosen = scores.mul(10).softmax(-1).topk(CHOICES)
        return x.mul_(10), chosen, weights

    def draw(self, seed: int) -> Case:
        """Inputs, and the result."""
        given = self.inputs(seed)
        want = wanted(*given)
        return Case(given, want, BOUND * want.abs().max().expand(want.shape))

    def given(self) -> list[torch.Tensor]:
        """Memory of tokens, of their experts and weights."""
        x, weights = trials.nothing(self.tokens, FEATURES), trials.nothing(self.tokens, CHOICES, dtype=torch.float32)
        return [x, torch.zeros(self.tokens, CHOICES, dtype=torch.int64, device=x.device), weights]

    def ours(self) -> Runner:
        """One operator."""
        x, chosen, weights = given = self.given()
        gate_up, down, *scales = experts()

        def call() -> torch.Tensor:
            return ops.moe_layer(x, (chosen, weights), gate_up, down, scales=tuple(scales))

        return checked(self.draw, trials.into(*given), call)

    def alone(self) -> Runner:
        """Both GEMMs of random rows, as many as the tokens of all ranks need; the result is not used."""
        _, chosen, weights = self.inputs(0)
        routing = ops.moe_route(chosen, LOCAL * tilescale.init().size, weights)
        gate_up, down, of_gate_up, of_down = experts()
        rows, active = (_random(routing.room, n) for n in (FEATURES, INNER))
        of_rows, of_active = (_scales(n // GROUP, routing.room) for n in (FEATURES, INNER))
        y, none = trials.nothing(routing.room, FEATURES), trials.nothing(1, 1)
        first = local_kernel(grouped_float8.scaled_gated_program, 0, INNER, FEATURES)
        second = local_kernel(grouped_float8.scaled_program, FEATURES, INNER, INNER)

        def call() -> torch.Tensor:
            first(rows, of_rows, gate_up, of_gate_up, routing.owners, none, active, of_active)
            second(active, of_active, down, of_down, routing.owners, y)
            return y

        return Runner(call, lambda seed: None)


@functools.cache
def experts() -> list[torch.Tensor]:
    """This rank's gate_up and down, and their scales."""
    weights = [_random(LOCAL, 2 * INNER, FEATURES), _random(LOCAL, FEATURES, INNER)]
    scales = [_scales(*(n // GROUP if i else n for i, n in enumerate(w.shape))) for w in weights]
    return [*weights, *(s.mul_(w.shape[2] ** -0.5) for s, w in zip(scales, weights, strict=True))]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=trials.device(), dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=trials.device()) + 0.5


def wanted(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each token by its experts of all ranks, in float32 of the quantized numbers."""
    tokens, y = _quantized(x.float()), torch.zeros(x.shape, device=x.device)
    for rank in range(dist.get_world_size()):
        for local in range(LOCAL):
            gate_up, down, of_gate_up, of_down = (_of_rank(rank, each[local]) for each in experts())
            token, choice = (chosen == rank * LOCAL + local).nonzero(as_tuple=True)
            gate, up = (tokens[token] @ _whole(gate_up, of_gate_up).t()).chunk(2, -1)
            made = _quantized(torch.nn.functional.silu(gate) * up) @ _whole(down, of_down).t()
            y.index_add_(0, token, made * weights[token, choice, None])
    return y


def _of_rank(rank: int, x: torch.Tensor) -> torch.Tensor:
    """Another rank's tensor; collective."""
    given = x.view(torch.uint8).clone()
    dist.broadcast(given, rank)
    return given.view(x.dtype)


def _whole(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return weight.float() * scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)


def _quantized(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-117) / 448).exponent
    scale = torch.ldexp(torch.ones_like(groups[..., :1]), exponent)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
