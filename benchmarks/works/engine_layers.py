# SPDX-License-Identifier: MIT
"""The decoder layers of `decoder_layers.py`, parallelised by PyTorch and compiled, with several sets of operators."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import trials
from decoder_layers import GRAPHS, STEPS, Steps, Work
from model_families import LLAMA
from runs import say

import tilescale
from tilescale import ops
from tilescale.tuning.places import TIMERS
from tilescale.tuning.race import Contender, Heat, Runner


@dataclass(frozen=True)
class Compiled:
    """A configuration for compiling the layers.

    Attributes:
        options: of inductor, different where graphs differ: dynamo shares those of equal options.
        install: arguments of `ops.installed`; None: PyTorch's operators.
    """

    name: str
    options: dict[str, Any]
    install: dict[str, bool] | None = None

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model is compiled and run."""
        return contextlib.nullcontext() if self.install is None else ops.installed(**self.install)


WAYS = (
    Compiled("torch", {}),
    Compiled("torch, async TP", {"_micro_pipeline_tp": True}),
    Compiled("async TP, installed", {"_micro_pipeline_tp": True}, {}),
    Compiled("installed, graphs", {"_micro_pipeline_tp": False}, {"graphs": True}),
)

WORKS = (
    ("prefill", "eager", 4096),
    ("training_step", "eager", 4096),
    ("prefill", "eager", 3001),
    ("decode", "graph", 1),
)


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Sequences x tokens x features x layers."""
    if gpus == 1 or quick:
        return
    for kind, mode, tokens in WORKS:
        work = Work(LLAMA, kind, 1, tokens)
        ways = [way for way in WAYS if "async" not in way.name or tokens % gpus == 0]  # only for split sequences
        entries = [Contender(way.name, lambda way=way, work=work, mode=mode: ready(way, work, mode)) for way in ways]
        shape = 1, tokens, LLAMA.hidden, LLAMA.layers
        yield Heat(f"{LLAMA.name} {kind}", shape, "bfloat16", gpus, mode, "torch", entries, calls=3)


def ready(way: Compiled, work: Work, mode: str) -> Runner:
    """A contender; its operators are installed around each group of calls, outside the measured time."""
    whole = torch.zeros(work.batch, work.tokens, work.family.hidden, device=trials.device(), dtype=torch.bfloat16)
    x = work.mine(whole)
    with way.installed(), told():
        call, fused = made(way, work, x), fusions()
    timed: list[Callable[[int], float]] = []

    def check(seed: int) -> None:
        case = work.draw(seed)
        with way.installed(), told():
            x.copy_(*case.inputs)
            result = torch.stack([call(x) for _ in range(STEPS)]) if work.trains else call(x)
            torch.cuda.synchronize()
        say(f"    {way.name}: {fused or 'no patterns'} replaced")
        trials.compare(result, case)

    def group(calls: int) -> float:
        with way.installed(), told():
            if not timed:
                timed.append(TIMERS[mode]().prepare(lambda: call(x)))
            return timed[0](calls)

    return Runner(lambda: call(x), check, group)


def made(way: Compiled, work: Work, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of this rank's tokens that returns the result, or the loss before a step; all of it is compiled."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    torch._dynamo.config.recompile_limit = GRAPHS
    mesh = init_device_mesh(trials.device().type, (tilescale.init().size,))
    enable_symm_mem_for_group(mesh.get_group().group_name)
    model = parallelize_module(work.model(), mesh, work.family.plan(work.sequence))
    for layer in model.layers:
        layer.compile(dynamic=False, options=way.options)
    with torch.set_grad_enabled(work.trains):
        if way.install is not None:
            ops.warm_up(model, x)
    return Steps(model, work.batch * work.tokens * work.family.hidden) if work.trains else torch.no_grad()(model)


def fusions() -> dict[str, int]:
    """Number of graph patterns replaced by operators of TileScale, and reasons against the others."""
    from tilescale.ops.graph_patterns import replaced

    return {f"{name} {why}".strip(): count for (name, why), count in replaced.items()}


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Print where an error comes from before the race records it as a result."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise
