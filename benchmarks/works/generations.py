# SPDX-License-Identifier: MIT
"""`generate` of a model of transformers, loaded with a tensor-parallel plan: of its styles, and of TileScale's."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trials
from model_families import LLAMA, SEED

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

SEQUENCES, PROMPT, NEW = 8, 512, 32
STYLES = {"transformers": "", "tilescale styles": "tilescale_"}
"""Contenders, and what the names of their styles begin with."""

NEAR = 0.02
"""Difference of logits, relative to the largest one, between which the rounding of sums may choose."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Sequences x tokens of the prompt x new tokens x layers."""
    if gpus == 1 or quick:
        return
    entries = [Contender(name, functools.partial(ready, prefix)) for name, prefix in STYLES.items()]
    shape = SEQUENCES, PROMPT, NEW, LLAMA.layers
    yield Heat(f"{LLAMA.name} generate", shape, "bfloat16", gpus, "eager", "transformers", entries, calls=1)


def ready(prefix: str) -> Runner:
    """A contender, which chooses the likeliest token each time."""
    model, prompt = loaded(prefix), torch.zeros(SEQUENCES, PROMPT, dtype=torch.int64, device=trials.device())

    def call() -> Any:
        return model.generate(prompt, max_new_tokens=NEW, do_sample=False)

    def check(seed: int) -> None:
        generator = torch.Generator(prompt.device).manual_seed(seed)  # the same on all ranks
        prompt.random_(1, model.config.vocab_size, generator=generator)
        result = call()
        with torch.no_grad():
            logits = whole()(result).logits[:, PROMPT - 1 : -1].float()
        want = logits.amax(-1)
        case = trials.Case((), want, NEAR * logits.abs().amax().expand_as(want))
        trials.compare(logits.gather(-1, result[:, PROMPT:, None]), case)

    return Runner(call, check)


def loaded(prefix: str) -> Any:
    """The model as transformers loads it by a plan; collective."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from tilescale.ops import transformers_styles

    folder, size = saved(), tilescale.init().size
    transformers_styles.register()
    styles = whole().config.base_model_tp_plan.items()
    plan = {f"model.{name}": prefix + style for name, style in styles if style in ("colwise", "rowwise")}
    split = DistributedConfig(tp_size=size, tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=split)
    model.generation_config.eos_token_id = None
    return model.eval()


@functools.cache
def whole() -> Any:
    """The whole model, with the same random weights on each rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    with trials.device():
        return AutoModelForCausalLM.from_config(LLAMA.config, dtype=torch.bfloat16).eval()


@functools.cache
def saved() -> Path:
    """The folder to which the first rank has saved the whole model; collective."""
    world = tilescale.init()
    folder = Path(world.broadcast(tempfile.mkdtemp() if world.rank == 0 else None))
    if world.rank == 0:
        whole().save_pretrained(folder)
    dist.barrier()
    return folder
