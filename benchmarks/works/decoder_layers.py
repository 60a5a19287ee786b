# SPDX-License-Identifier: MIT
"""Decoder layers of `transformers` at the sizes of Llama 3 8B, random weights: PyTorch's tensor parallelism and ours.

One plan for both. In training and in prefills of even length the tokens lie over the ranks between the layers; in odd
prefills and decode each rank has all of them. Losses and results are compared with the layers on one GPU first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import trials
from torch import nn
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

HIDDEN, LAYERS, SEED = 4096, 4, 7
PREFILLS, BATCHES = (4096, 3001), (1, 16)
STEPS, BOUND = 3, 2.0**-4
"""Steps of training whose losses are compared; how far results may be off, relative to their magnitudes or to one."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Sequences x tokens x features x layers."""
    if gpus == 1 or quick:
        return
    for work, mode, batch, tokens in (
        ("training_step", "eager", 1, 4096),
        *(("prefill", "eager", 1, tokens) for tokens in PREFILLS),
        *(("decode", "graph", batch, 1) for batch in BATCHES),
    ):
        entries = []
        for name, ours in (("torch", False), ("tilescale", True)):
            for compiled in (False, True):
                make = functools.partial(Work(work, batch, tokens).runner, ours, compiled)
                entries.append(Contender(f"{name}, compiled" if compiled else name, make))
        shape = batch, tokens, HIDDEN, LAYERS
        yield Heat(f"llama3_8b {work}", shape, "bfloat16", gpus, mode, "torch", entries, calls=3)


class Stack(nn.Module):
    """The decoder layers of a Llama, over tokens that are embedded already."""

    def __init__(self, tokens: int):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=8192, attn_implementation="sdpa",
        )  # fmt: skip
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, number) for number in range(LAYERS))
        self.rotary = LlamaRotaryEmbedding(config)
        self.tokens = tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, features), of this rank's tokens where they lie over the ranks."""
        positions = torch.arange(self.tokens, device=x.device)[None]
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return x


def plan(sequence: bool) -> dict[str, Any]:
    """As torchtitan has it for Llama; `sequence`: tokens lie over the ranks between layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    names = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
    columns = {f"layers.*.{name}": ColwiseParallel() for name in names}
    rows = ("self_attn.o_proj", "mlp.down_proj")
    if not sequence:
        return columns | {f"layers.*.{name}": RowwiseParallel() for name in rows}
    split, whole = Shard(1), Replicate()
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    return {
        "layers.*.input_layernorm": SequenceParallel(),
        "layers.*.self_attn": attention,
        "layers.*.post_attention_layernorm": SequenceParallel(),
        "layers.*.mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
        **columns,
        **{f"layers.*.{name}": RowwiseParallel(output_layouts=split) for name in rows},
    }


@dataclass(frozen=True)
class Work:
    """A step of training, a prefill, or a step of decode."""

    kind: str
    batch: int
    tokens: int

    @property
    def trains(self) -> bool:
        """Whether it has a backward and an optimiser."""
        return self.kind == "training_step"

    @property
    def sequence(self) -> bool:
        """Whether tokens lie over the ranks between the layers."""
        return self.tokens % dist.get_world_size() == 0

    def model(self) -> Stack:
        """All of it, the same each time on each rank."""
        generator = torch.Generator(trials.device()).manual_seed(SEED)
        with torch.device(trials.device()):
            model = Stack(self.tokens).bfloat16()
        for weight in model.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=HIDDEN**-0.5 / 2, generator=generator)
        return model.train(self.trains)

    def draw(self, seed: int) -> Case:
        """Tokens, and what one GPU makes of them: the losses of some steps, or the result."""
        generator = torch.Generator(trials.device()).manual_seed(seed)
        shape = self.batch, self.tokens, HIDDEN
        whole = torch.randn(shape, generator=generator, device=trials.device()).bfloat16()
        run = Steps(self.model(), whole.numel(), alone=True) if self.trains else torch.no_grad()(self.model())
        want = torch.stack([run(whole) for _ in range(STEPS)]) if self.trains else self.mine(run(whole)).float()
        return Case((self.mine(whole),), want, BOUND * want.abs().clamp(min=1))

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens."""
        return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() if self.sequence else whole

    def runner(self, ours: bool, compiled: bool) -> Runner:
        """A contender, checked on the losses of its first steps, or on its results."""
        x = self.mine(torch.zeros(self.batch, self.tokens, HIDDEN, device=trials.device(), dtype=torch.bfloat16))
        call = self._made(x, ours, compiled)
        if not self.trains:
            return checked(self.draw, trials.into(x), lambda: call(x))

        def check(seed: int) -> None:
            case = self.draw(seed)
            x.copy_(*case.inputs)
            trials.skew(seed)
            trials.compare(torch.stack([call(x) for _ in range(STEPS)]), case)

        return Runner(lambda: call(x), check)

    def _made(self, x: torch.Tensor, ours: bool, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """What takes this rank's tokens, such as x, and gives the result, or the loss before a step."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from tilescale import ops

        mesh = init_device_mesh(trials.device().type, (tilescale.init().size,))
        parallelize = ops.parallelize_module if ours else parallelize_module
        model = parallelize(self.model(), mesh, plan(self.sequence))
        with torch.set_grad_enabled(self.trains):
            if ours:
                ops.warm_up(model, x)
        if compiled:
            for layer in model.layers:
                layer.compile()
        return Steps(model, self.batch * self.tokens * HIDDEN) if self.trains else torch.no_grad()(model)


class Steps:
    """Steps of training of a model: the loss is half of the mean of the squares of its results."""

    def __init__(self, model: nn.Module, elements: int, *, alone: bool = False):
        """`elements` of the whole result; `alone`: all of it is on this rank."""
        self._model, self._elements, self._alone = model, elements, alone
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A step; the loss before it."""
        loss = self._model(x).float().pow(2).sum() / (2 * self._elements)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        whole = loss.detach()
        if not self._alone:
            dist.all_reduce(whole)
        return whole
