# SPDX-License-Identifier: MIT
"""A layer of float8 experts, as large as DeepSeek-V3's, and its two grouped GEMMs alone; and training in float8.

The GEMMs alone have all tokens in the rows of their experts beforehand, and send nothing; they are those of the layer's
form for as many tokens. Training quantizes bfloat16 experts in each call; its baseline is the layer in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import expert_grids
import expert_layers
import torch
import torch.distributed as dist
import trials
from trials import Case, checked

import tilescale
from tilescale import ops
from tilescale.ops import grouped_float8
from tilescale.ops.few_rows_gemm import ROWS
from tilescale.ops.float8_wire import GROUP, WIRE
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.kernels import local_kernel
from tilescale.tuning.race import Contender, Heat, Runner

FEATURES, INNER, LOCAL, CHOICES = 7168, 2048, 32, 8

TOKENS, FEW = (16, 64, 128, 4096), 128

ALONE, WIDE = "grouped GEMMs alone", "tilescale, bfloat16"

FORMS: dict[str, dict[str, Any]] = {
    "tilescale": {},
    "tilescale, float8 sums": {"wire": WIRE},
    "tilescale, scales of rows": {"by_rows": True},
}
"""Forms of the operator."""

RECIPE = ops.Float8("blockwise", torch.bfloat16)

TRAINING: dict[str, dict[str, Any]] = {
    WIDE: {},
    "tilescale": {"float8": RECIPE},
    "tilescale, float8 sums": {"float8": RECIPE, "wire": WIRE},
}
"""Options of the operator that is trained."""

BOUND = 2.0**-4
"""Error bound of elements, relative to the largest: roundings to bfloat16, and of activations to float8."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Tokens of a rank x features x inner x experts."""
    if gpus == 1:
        return
    for tokens in (16,) if quick else TOKENS:
        work, shape = Work(tokens), (tokens, FEATURES, INNER, gpus * LOCAL)
        entries = [Contender(ALONE, work.alone)]
        entries += [Contender(name, functools.partial(work.ours, **form)) for name, form in FORMS.items()]
        for mode in ("eager", "graph", *(["host"] if tokens == TOKENS[0] else [])):
            flops = tokens * CHOICES * 6 * FEATURES * INNER
            yield Heat("experts forward", shape, "float8_e4m3fn", gpus, mode, ALONE, entries, flops=flops)
    for tokens in (128,) if quick else (128, 4096):
        for mode in ("eager", "graph"):
            yield expert_layers.heat(tokens, True, mode, _trained_layers(), gpus, "float8_e4m3fn")


def _trained_layers() -> dict[str, expert_layers.Layer]:
    return {name: functools.partial(expert_layers.ours, **options) for name, options in TRAINING.items()}


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

    def draw(self, by_rows: bool, seed: int) -> Case:
        given = self.inputs(seed)
        want = wanted(*given, by_rows)
        return Case(given, want, BOUND * want.abs().max().expand(want.shape))

    def given(self) -> list[torch.Tensor]:
        """Memory of tokens, of their experts and weights."""
        x, weights = trials.nothing(self.tokens, FEATURES), trials.nothing(self.tokens, CHOICES, dtype=torch.float32)
        return [x, torch.zeros(self.tokens, CHOICES, dtype=torch.int64, device=x.device), weights]

    def ours(self, by_rows: bool = False, **options: Any) -> Runner:
        """One operator; weights have a scale for each row, or for each square."""
        x, chosen, weights = given = self.given()
        gate_up, down, *scales = experts(by_rows)

        def call() -> torch.Tensor:
            return ops.moe_layer(x, (chosen, weights), gate_up, down, scales=tuple(scales), **options)

        return checked(functools.partial(self.draw, by_rows), trials.into(*given), call)

    def alone(self) -> Runner:
        """Both GEMMs of random rows, as many as the tokens of all ranks need; the result is not used."""
        _, chosen, weights = self.inputs(0)
        routing = ops.moe_route(chosen, LOCAL * tilescale.init().size, weights)
        gate_up, down, of_gate_up, of_down = experts()
        rows, active = (_random(routing.room, n) for n in (FEATURES, INNER))
        of_rows, of_active = (_scales(n // GROUP, routing.room) for n in (FEATURES, INNER))
        y, none = trials.nothing(routing.room, FEATURES), trials.nothing(1, 1)
        if self.tokens <= FEW:
            owner = torch.arange(LOCAL, dtype=torch.int32, device=y.device)
            owners = owner.repeat_interleave((routing.counts + ROWS - 1) // ROWS)
            both = local_kernel(expert_grids.few_float8_program, LOCAL, FEATURES, INNER, at_once())
            given = rows, of_rows, gate_up, of_gate_up, down, of_down, owners, active, of_active, y
            return Runner(functools.partial(both, *given), lambda seed: None)
        first = local_kernel(expert_grids.scaled_gated_program, 0, INNER, FEATURES)
        second = local_kernel(grouped_float8.scaled_program, FEATURES, INNER, INNER)

        def call() -> torch.Tensor:
            first(rows, of_rows, gate_up, of_gate_up, routing.owners, none, active, of_active)
            second(active, of_active, down, of_down, routing.owners, y)
            return y

        return Runner(call, lambda seed: None)


@functools.cache
def _weights() -> list[torch.Tensor]:
    return [_random(LOCAL, 2 * INNER, FEATURES), _random(LOCAL, FEATURES, INNER)]


@functools.cache
def experts(by_rows: bool = False) -> list[torch.Tensor]:
    """This rank's gate_up and down, and their scales."""
    squares = [w.shape[:2] if by_rows else (LOCAL, *(n // GROUP for n in w.shape[1:])) for w in _weights()]
    return [*_weights(), *(_scales(*s).mul_(w.shape[2] ** -0.5) for s, w in zip(squares, _weights(), strict=True))]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=trials.device(), dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=trials.device()) + 0.5


def wanted(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, by_rows: bool) -> torch.Tensor:
    """Each token by its experts of all ranks, in float32 of the quantized numbers."""
    tokens, y = _quantized(x.float()), torch.zeros(x.shape, device=x.device)
    for rank in range(dist.get_world_size()):
        for local in range(LOCAL):
            gate_up, down, of_gate_up, of_down = (_of_rank(rank, each[local]) for each in experts(by_rows))
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
    if scales.ndim == 1:
        return weight.float() * scales[:, None]
    return weight.float() * scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)


def _quantized(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-117) / 448).exponent
    scale = torch.ldexp(torch.ones_like(groups[..., :1]), exponent)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
