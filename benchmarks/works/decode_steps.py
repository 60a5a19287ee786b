# SPDX-License-Identifier: MIT
"""A decode step of layers of Llama 3 8B or Qwen3-MoE: one launch, in order, by PyTorch, by operators; and the floor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import expert_steps
import torch
import torch.distributed as dist
import trials
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from trials import Case, checked

import tilescale
from tilescale import ops
from tilescale.ops.decode_float8 import END
from tilescale.ops.decode_program import decode_layers
from tilescale.ops.decode_sizes import DEPTH, FLOAT8, LayerSizes
from tilescale.tuning.race import Contender, Heat, Runner

Tensors = dict[str, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Sum over the ranks of (sequences, inputs) times the transpose of (outputs, inputs)."""

EPS, THETA, BOUND = 1e-5, 500_000.0, 2.0**-4
"""Of norms; base of the rotation; largest error, relative to what the layer adds to the residual stream."""

FEW = 2.0**-12
"""Scale of what layers of experts add, so that rows choose the same experts in each call."""

BASELINE = "weights read once"
SCHEDULES = {"one launch": "persistent", "in order": "sequential"}


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Sequences x cached tokens x features, in CUDA graphs; the baseline reads as many bytes as the weights have."""
    for batch, layers in ((1, 1),) if quick else ((1, 1), (1, 4), (16, 1), (16, 4)):
        for form in FORMS:
            yield Work(sizes_of(batch, gpus, layers, **form)).heat()
    for batch, layers in () if quick else ((1, 1), (1, 4), (4, 1), (8, 1)):
        yield Work(sizes_with_experts(batch, gpus, layers)).heat()


FORMS: tuple[dict[str, Any], ...] = ({}, {"weights": FLOAT8}, {"page": 16})
"""Of weights and cache: bfloat16 without pages, float8 with scales of 128 x 128, and pages of 16 tokens."""


def sizes_of(batch: int, gpus: int, layers: int, **form: Any) -> LayerSizes:
    """Those of Llama 3 8B on these GPUs."""
    heads, groups, inner = (n // gpus for n in (32, 8, 14336))
    sizes = LayerSizes(batch, gpus, heads=heads, groups=groups, inner=inner, layers=layers, **form)
    return replace(sizes, pages=batch * sizes.keys // sizes.page) if sizes.page else sizes


def sizes_with_experts(batch: int, gpus: int, layers: int, experts: int = 64) -> LayerSizes:
    """Those of Qwen3-30B-A3B on these GPUs, with half of its experts."""
    heads, groups, inner = (n // gpus for n in (32, 4, 768))
    shares = {"heads": heads, "groups": groups, "inner": inner, "head_norms": True}
    return LayerSizes(batch, gpus, hidden=2048, layers=layers, experts=experts, choices=8, **shares)


@dataclass(frozen=True)
class Work:
    """A decode step of layers."""

    sizes: LayerSizes

    def heat(self) -> Heat:
        """Everything races against the time of reading the weights."""
        s = self.sizes
        entries = [
            Contender(BASELINE, self.reading),
            *(
                Contender(name, functools.partial(self.ours, how), lambda h=how: self.kernel(h))
                for name, how in SCHEDULES.items()
            ),
            *(Contender(name, functools.partial(self.torchs, *how)) for name, how in self.others.items()),
        ]
        shape = s.batch, s.keys, s.hidden
        family = f"moe {s.experts} experts" if s.experts else "llama"
        name = f"{family} decode {s.layers} layer{'s' * (s.layers > 1)}{', paged cache' * (s.page > 0)}"
        return Heat(name, shape, s.weights, s.devices, "graph", BASELINE, entries, bytes=self.nbytes)

    @property
    def others(self) -> dict[str, tuple[Product, expert_steps.Experts]]:
        """PyTorch's forms of products and of experts; none with weights or caches that it lacks."""
        if self.sizes.is_float8 or self.sizes.page:
            return {}
        if self.sizes.experts:
            forms = {"torch, compiled": expert_steps.gathered, "torch, grouped_mm": expert_steps.grouped}
            return {name: (nccl, form) for name, form in forms.items()}
        return {name: (product, expert_steps.gathered) for name, product in PRODUCTS.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's weights, and of the experts among them that are read."""
        given = tensors(self.sizes)
        sizes = {name: t.nbytes for name, t in given.items() if name.startswith("W")}
        if self.sizes.experts:
            share = sum(expert_steps.read(self.sizes, given, self.rows(0))) / (self.sizes.layers * self.sizes.experts)
            sizes |= {name: int(sizes[name] * share) for name in ("Wup", "Wdown")}
        return sum(sizes.values())

    def rows(self, seed: int) -> torch.Tensor:
        """A residual stream, the same on all ranks."""
        s, generator = self.sizes, torch.Generator(trials.device()).manual_seed(seed)
        count = s.batch * (expert_steps.CANDIDATES if s.experts else 1)
        x = torch.randn(count, s.hidden, generator=generator, device=trials.device())
        return expert_steps.distinct(s, tensors(s), x) if s.experts else x

    def draw(self, seed: int) -> Case:
        """A new residual stream, and the result of the same layer in float64."""
        x, given = self.rows(seed), tensors(self.sizes)
        wide = {name: dequantized(given, name) if t.is_floating_point() else t for name, t in given.items()}
        want = step(self.sizes, wide, x.double(), nccl, expert_steps.gathered).float()
        added = float((want - x).pow(2).mean().sqrt())
        return Case((x,), want, torch.full_like(want, BOUND * added))

    def reading(self) -> Runner:
        weights = torch.ones(self.nbytes // 4, device=trials.device())
        return Runner(weights.sum)

    def kernel(self, schedule: str) -> tilescale.Kernel:
        kernel = tilescale.compile(decode_layers(self.sizes), schedule=schedule, wait_s=trials.WAIT_S)
        kernel.prepare()
        return kernel

    def ours(self, schedule: str) -> Runner:
        """The program; its workspaces are poisoned before checked calls."""
        kernel, known, args = self.kernel(schedule), paged(self.sizes, tensors(self.sizes)), []
        for parameter in kernel.program.parameters:
            shape, dtype = tuple(map(int, parameter.shape)), getattr(torch, str(parameter.buffer.dtype))
            args.append(torch.zeros(shape, dtype=dtype, device=trials.device()))
            if (given := known.get(parameter.buffer.name)) is not None:
                args[-1].copy_(given)
        x = args[0]

        def call() -> torch.Tensor:
            kernel(*args)
            return x

        workspaces = [each for each in args[-WORKSPACES:] if each.is_floating_point()]
        return checked(self.draw, x.copy_, call, workspaces, kernel.synchronize)

    def torchs(self, product: Product, experts: expert_steps.Experts) -> Runner:
        """PyTorch's operators, compiled, with products that are summed over the ranks."""
        s, given = self.sizes, tensors(self.sizes)
        x = torch.zeros(s.batch, s.hidden, device=trials.device())
        torch._dynamo.config.recompile_limit = 64
        made = torch.compile(lambda x: step(s, given, x, product, experts), dynamic=False)
        return checked(self.draw, x.copy_, lambda: made(x))


WORKSPACES = 17
"""Last parameters of the program, which it writes before it reads them."""


@functools.cache
def tensors(sizes: LayerSizes) -> Tensors:
    """Weights and caches of this rank, by the names of the program's parameters; norms and positions are everyone's."""
    s, device, rank = sizes, trials.device(), tilescale.init().rank
    mine, common = (torch.Generator(device).manual_seed(seed) for seed in (1 + rank, 0))

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=mine, device=device).mul_(scale).bfloat16()

    values, cache = s.heads * s.width, (s.layers, s.batch, s.groups, s.keys, s.width)
    shapes = {"Wqkv": (s.projected, s.hidden), "Wo": (s.hidden, values)}
    experts, added = ((s.experts,), FEW) if s.experts else ((), 1.0)
    shapes |= {"Wup": (*experts, 2 * s.inner, s.hidden), "Wdown": (*experts, s.hidden, s.inner)}
    scales = {name: shape[-1] ** -0.5 * (added if name in ("Wo", "Wdown") else 1) for name, shape in shapes.items()}
    found = {name: random(s.layers, *shape, scale=scales[name]) for name, shape in shapes.items()}
    if s.is_float8:
        for name in shapes:
            found |= rounded(name, found[name])
    if s.experts:
        router = torch.randn((s.layers, s.scores, s.hidden), generator=common, device=device) * s.hidden**-0.5
        found["router"] = router.bfloat16()
    if s.head_norms:
        found["heads"] = torch.rand((s.layers, 2, s.width), generator=common, device=device) + 0.5
    found |= {
        name: torch.rand((s.layers, s.hidden), generator=common, device=device) + 0.5 for name in ("norm1", "norm2")
    }
    at = torch.full((s.batch,), s.keys - 1, dtype=torch.int32, device=device)
    turns = at[:, None] * THETA ** (-torch.arange(0, s.width, 2, device=device) / s.width)
    return found | {
        "K": random(*cache),
        "V": random(*cache),
        "lengths": at,
        "angles": torch.stack([turns.cos(), turns.sin()]),
    }


def rounded(name: str, weights: torch.Tensor) -> Tensors:
    """Weights as float8, and the scales of squares of them."""
    layers, outputs, inputs = weights.shape
    tiles = weights.view(layers, outputs // DEPTH, DEPTH, inputs // DEPTH, DEPTH).float()
    scales = tiles.abs().amax((2, 4), keepdim=True) / END
    return {name: (tiles / scales).to(torch.float8_e4m3fn).view(weights.shape), f"of_{name}": scales[:, :, 0, :, 0]}


def dequantized(t: Tensors, name: str) -> torch.Tensor:
    """A tensor in float64, weights times their scales."""
    if f"of_{name}" not in t:
        return t[name].double()
    scales = t[f"of_{name}"].double()
    return t[name].double() * scales.repeat_interleave(DEPTH, 1).repeat_interleave(DEPTH, 2)


def paged(sizes: LayerSizes, t: Tensors) -> Tensors:
    """The same with the cache in pages, in a random order, if there are some."""
    s = sizes
    if not s.page:
        return t
    table = torch.randperm(s.pages, device=t["K"].device).view(s.table)
    pages = {}
    for name in "KV":
        parts = t[name].view(s.layers, s.batch, s.groups, -1, s.page, s.width)
        pages[name] = torch.empty(s.cache, dtype=parts.dtype, device=parts.device)
        pages[name][:, table] = parts.permute(0, 1, 3, 4, 2, 5)
    return t | pages | {"block_table": table.int()}


def step(
    sizes: LayerSizes, t: Tensors, x: torch.Tensor, product: Product, experts: expert_steps.Experts
) -> torch.Tensor:
    """The layers: the residual stream (sequences, features) behind them."""
    everywhere = {name: t[name] for name in ("lengths", "angles")}
    for layer in range(sizes.layers):
        own = {name: values[layer] for name, values in t.items() if name not in everywhere}
        x = layer_step(sizes, own | everywhere, x, product, experts)
    return x


def layer_step(
    sizes: LayerSizes, t: Tensors, x: torch.Tensor, product: Product, experts: expert_steps.Experts
) -> torch.Tensor:
    """One layer; its caches get the new keys and values."""
    s, kind = sizes, t["Wo"].dtype
    rows = torch.arange(s.batch, device=x.device)
    h = (rms_norm(x, (s.hidden,), eps=EPS) * t["norm1"]).to(kind)
    parts = linear(h, t["Wqkv"]).view(s.batch, -1, s.width).split([s.heads, s.groups, s.groups], 1)
    given = parts[:2]
    if s.head_norms:
        given = [rms_norm(part, (s.width,), eps=EPS) * weight for part, weight in zip(given, t["heads"], strict=True)]
    q, k = (rotated(part, *t["angles"]).to(kind) for part in given)
    t["K"][rows, :, t["lengths"]], t["V"][rows, :, t["lengths"]] = k, parts[2]
    o = scaled_dot_product_attention(q[:, :, None], t["K"], t["V"], enable_gqa=True).reshape(s.batch, -1)
    x = x + product(o, t["Wo"])
    h = (rms_norm(x, (s.hidden,), eps=EPS) * t["norm2"]).to(kind)
    if s.experts:
        return x + summed(experts(s, t, h))
    gate, up = linear(h, t["Wup"]).chunk(2, 1)
    return x + product(silu(gate) * up, t["Wdown"])


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(sequences, heads, features), the two halves of the features turned by angles."""
    a, b = heads.chunk(2, -1)
    return torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)


def nccl(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product, and its sum by NCCL."""
    return summed(linear(a, weight))


def summed(made: torch.Tensor) -> torch.Tensor:
    """A sum over the ranks by NCCL."""
    return functional.all_reduce(made, "sum", dist.group.WORLD) if tilescale.init().size > 1 else made


def fused(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that is summed by our operator."""
    return ops.matmul_all_reduce(a, weight.t())


PRODUCTS: dict[str, Product] = {"torch, compiled": nccl, "operators": fused}
