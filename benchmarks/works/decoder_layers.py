# SPDX-License-Identifier: MIT
"""Tensor-parallel decoder layers of published models: PyTorch's and TileScale's, eager and compiled, by one plan.

In training and in prefills of even length the tokens are split over the ranks between the layers; in odd prefills and
decode each rank has all of them. Experts are split over the ranks. Losses and results are compared with the layers on
one GPU first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import expert_blocks
import torch
import torch.distributed as dist
import trials
from device_trace import idle_percent
from model_families import FAMILIES, LLAMA, SEED, Family, Stack
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

PREFILLS, SHORTEST, WHOLE = "prefill of a new length", 16, 32
"""The work of `Prefills`, how many times longer than the shortest one the longest is, and layers of Llama 3 8B."""

STEPS, BOUND = 3, 2.0**-4
"""Number of training steps whose losses are compared; error bound of the results of up to `FEW` layers, relative to
their magnitudes or to one."""

FEW = 4
"""More layers have the bound times the square root of their number through this: errors of rounding add up so."""

CLOSE = 2.0**-7
"""Distance of two logits of a router that rounding may reverse."""

GRAPHS = 64
"""Number of compiled graphs kept for a function: each contender, work and model has its own."""


@dataclass(frozen=True)
class Way:
    """Parallelisation of layers.

    Attributes:
        ours: whether by TileScale.
        compiled: options of `torch.compile` for each; None: eager.
        keeps: whether gathered tokens are kept for the backward pass.
    """

    ours: bool
    compiled: dict[str, Any] | None = None
    keeps: bool = False


ASYNC = {"_micro_pipeline_tp": True}
CONTENDERS = {
    "torch": Way(ours=False),
    "tilescale": Way(ours=True),
    "tilescale, gathered kept": Way(ours=True, keeps=True),
    "torch, compiled": Way(ours=False, compiled={}),
    "tilescale, compiled": Way(ours=True, compiled={"fullgraph": True}),
    "torch, async TP": Way(ours=False, compiled={"options": ASYNC}),
    "torch, CUDA graphs": Way(ours=False, compiled={"mode": "reduce-overhead"}),
    "tilescale, CUDA graphs": Way(ours=True, compiled={"mode": "reduce-overhead", "fullgraph": True}),
}


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Sequences x tokens x features x layers."""
    if gpus == 1 or quick:
        return
    for model in FAMILIES:
        for work, mode, batch, tokens in _works(model):
            family = kind_of(work).of(model)
            entries = [
                Contender(name, functools.partial(kind_of(work)(family, work, batch, tokens).runner, way))
                for name, way in CONTENDERS.items()
                if _suits(way, family, work, tokens % gpus == 0)
            ]
            shape = batch, tokens, family.hidden, family.layers
            yield Heat(f"{family.name} {work}", shape, "bfloat16", gpus, mode, "torch", entries, calls=3)


def _suits(way: Way, family: Family, work: str, split: bool) -> bool:
    """Whether a contender can do this work and would differ from another one in it; `split`: over the ranks."""
    if way.compiled == {"options": ASYNC}:
        return split and not family.experts and work != PREFILLS
    if way.compiled and way.compiled.get("mode"):  # decode is in a graph anyway; sizes of PyTorch's experts change
        return work not in ("decode", PREFILLS) and (way.ours or not family.experts)
    return not way.keeps or work == "training_step"


def _works(family: Family) -> Iterator[tuple[str, str, int, int]]:
    """Work, mode, sequences, tokens."""
    yield "training_step", "eager", 1, 4096
    yield "prefill", "eager", 1, 4096
    if family is LLAMA:
        yield "training_step", "eager", 4, 1024
    if not family.experts:
        yield "prefill", "eager", 1, 3001
        if family is LLAMA:
            yield PREFILLS, "eager", 1, 2048
        for batch in (1, 4, 16):
            yield "decode", "graph", batch, 1
        yield "decode", "eager", 1, 1


@dataclass(frozen=True)
class Work:
    """A step of training, a prefill, or a step of decode."""

    family: Family
    kind: str
    batch: int
    tokens: int

    @staticmethod
    def of(family: Family) -> Family:
        """The layers that do the work."""
        return family

    @property
    def trains(self) -> bool:
        """Whether the work has a backward pass and an optimiser."""
        return self.kind == "training_step"

    @property
    def sequence(self) -> bool:
        """Whether tokens are split over the ranks between the layers."""
        return self.tokens % dist.get_world_size() == 0

    def model(self) -> Stack:
        """All tokens, the same each time on each rank."""
        return self.family.stack(self.tokens, trials.device()).train(self.trains)

    def draw(self, seed: int) -> Case:
        """Tokens, and the results of one GPU: the losses of some steps, or the output."""
        return _drawn(self, seed)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() if self.sequence else whole

    def runner(self, way: Way) -> Runner:
        """A contender, checked on the losses of its first steps, or on its results."""
        gc.collect()  # models are in cycles: freed later, memory of another contender would be missing in the peak
        features, before = self.family.hidden, torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        x = self.mine(torch.zeros(self.batch, self.tokens, features, device=trials.device(), dtype=torch.bfloat16))
        call = self._made(x, way)
        if not self.trains:
            return replace(checked(self.draw, trials.into(x), lambda: call(x)), call=self.timed(call, x))

        def check(seed: int) -> None:
            case = self.draw(seed)
            x.copy_(*case.inputs)
            trials.skew(seed)
            gc.collect()  # the model on one GPU
            torch.cuda.reset_peak_memory_stats()
            trials.compare(torch.stack([call(x) for _ in range(STEPS)]), case)

        def peak() -> float:
            return (torch.cuda.max_memory_allocated() - before) / 2**30

        return Runner(lambda: call(x), check, rates={"gib": peak, "idle": lambda: idle_percent(lambda: call(x))})

    def timed(self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The calls to time, of a function of this rank's tokens, such as x."""
        return lambda: call(x)

    def _made(self, x: torch.Tensor, way: Way) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function of this rank's tokens, such as x, that returns the result, or the loss before a step."""
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from tilescale import ops

        mesh = init_device_mesh(trials.device().type, (tilescale.init().size,))
        model = self.model()
        if self.family.experts:
            kind = expert_blocks.Ours if way.ours else expert_blocks.Torchs
            for layer in model.layers:
                layer.mlp = kind(layer.mlp)
        plan = self.family.plan(self.sequence)
        if way.ours:
            ops.parallelize_module(model, mesh, plan, keep_gathered=way.keeps)
            with torch.set_grad_enabled(self.trains):
                ops.warm_up(model, x)
        else:
            parallelize_module(model, mesh, plan)
        if way.compiled is not None:
            torch._dynamo.config.recompile_limit = GRAPHS
            if way.compiled.get("options") is ASYNC:
                enable_symm_mem_for_group(mesh.get_group().group_name)
            for layer in model.layers:
                layer.compile(**way.compiled, dynamic=self._dynamic(way))
        elements = self.batch * self.tokens * self.family.hidden
        step = Steps(model, elements) if self.trains else torch.no_grad()(model)

        def call(x: torch.Tensor) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()  # the graphs of all layers belong to one step
            return step(x)

        return call

    def _dynamic(self, way: Way) -> bool | None:
        """Whether sizes may change. One number of tokens is timed, but PyTorch's layers of experts have sizes that the
        router decides, on the host: fixed ones would be compiled again in each step."""
        return None if self.family.experts and not way.ours else False


class Prefills(Work):
    """Prefills, each of a number of tokens that has not run before, up to `tokens`, as in an engine that captures
    decode alone. Each rank has all tokens. Attention is not cuDNN's, as in engines: that takes 72 ms to plan for a new
    number of tokens. There are as many layers as in the model, which share what is new."""

    @staticmethod
    def of(family: Family) -> Family:
        """All layers of the model."""
        return replace(family, sizes=tuple({**dict(family.sizes), "num_hidden_layers": WHOLE}.items()))

    @property
    def sequence(self) -> bool:
        """Whether tokens are split over the ranks between the layers."""
        return False

    def model(self) -> Stack:
        """Tokens of the input."""
        return self.family.stack(None, trials.device()).eval()

    def timed(self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Calls with the first tokens of x: as many as no contender has had. The first one to have a number would else
        load the library's kernels for the others."""
        lengths = _lengths(max(self.tokens // SHORTEST, 1), self.tokens)
        return lambda: call(x[:, : next(lengths)])

    def _made(self, x: torch.Tensor, way: Way) -> Callable[[torch.Tensor], torch.Tensor]:
        call = super()._made(x, way)

        def of_any_length(x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                return call(x)

        return of_any_length

    def _dynamic(self, way: Way) -> bool:
        return True


@functools.cache
def _lengths(least: int, end: int) -> Iterator[int]:
    """All numbers from `least` on, once, in an order that is the same on all ranks."""
    return iter(random.Random(SEED).sample(range(least, end), end - least))


def kind_of(work: str) -> type[Work]:
    """The class of a work."""
    return Prefills if work == PREFILLS else Work


@functools.lru_cache(1)
def _drawn(work: Work, seed: int) -> Case:
    """Like `Work.draw`: all contenders of a work are compared with the same result."""
    generator = torch.Generator(trials.device()).manual_seed(seed)
    shape = work.batch, work.tokens, work.family.hidden
    whole = torch.randn(shape, generator=generator, device=trials.device()).bfloat16()
    model = work.model()
    if work.trains:
        run = Steps(model, whole.numel(), alone=True)
        want = torch.stack([run(whole) for _ in range(STEPS)])
        return Case((work.mine(whole),), want, _bound(work, want))
    with torch.no_grad(), close_choices(model) as found:
        want = work.mine(model(whole)).float()
    bound = _bound(work, want)
    for is_close in found:  # rounding decides there which experts a token takes
        bound.masked_fill_(work.mine(is_close.view(*whole.shape[:2], 1)), torch.inf)
    return Case((work.mine(whole),), want, bound)


def _bound(work: Work, want: torch.Tensor) -> torch.Tensor:
    return BOUND * max(work.family.layers / FEW, 1.0) ** 0.5 * want.abs().clamp(min=1)


@contextlib.contextmanager
def close_choices(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """For each router, when it is called: whether the last expert of a token has hardly more than the next one."""
    found: list[torch.Tensor] = []

    def note(router: nn.Module, _: object, made: tuple[torch.Tensor, ...]) -> None:
        best = made[0].float().topk(router.top_k + 1, -1).values
        found.append(best[:, -2] - best[:, -1] < CLOSE)

    routers = (each for each in model.modules() if hasattr(each, "top_k") and hasattr(each, "weight"))
    hooks = [router.register_forward_hook(note) for router in routers]
    yield found
    for hook in hooks:
        hook.remove()


class Steps:
    """Training steps of a model: the loss is half of the mean of the squares of its results."""

    def __init__(self, model: nn.Module, elements: int, *, alone: bool = False):
        """`elements` of the whole result; `alone`: all of it is on this rank."""
        self._model, self._elements, self._alone = model, elements, alone
        shards = [p for p in model.parameters() if hasattr(p, "placements")]
        plain = [p for p in model.parameters() if not hasattr(p, "placements")]
        # PyTorch's optimisers update DTensors and other tensors in separate calls.
        self._optimizers = [torch.optim.AdamW(each, lr=1e-4, foreach=True) for each in (shards, plain) if each]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Take a step; return the loss before it."""
        loss = self._model(x).float().pow(2).sum() / (2 * self._elements)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = loss.detach()
        if not self._alone:
            dist.all_reduce(whole)
        return whole
