# SPDX-License-Identifier: MIT
"""The contenders of benchmarks/models.py, with small models and without GPUs: all pass their own checks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import tilescale

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / folder) for folder in (".", "works")]
for name in ("synchronize", "reset_peak_memory_stats", "_sleep"):
    setattr(torch.cuda, name, lambda *given: None)

import decoder_layers  # noqa: E402 - asks for what is replaced above
import trials  # noqa: E402
from model_families import FAMILIES, Family  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIZES = {
    "qwen3_30b_a3b": EXPERTS,
    "mixtral_8x7b": {"num_local_experts": 4},
    "gemma3_27b": {"sliding_window": 4},
}


def small(family: Family) -> Family:
    """A model with small layers."""
    return replace(family, sizes=tuple((dict(family.sizes) | SMALL | SIZES.get(family.name, {})).items()))


def check(family: Family, kind: str, tokens: int, *contenders: str) -> None:
    """Raises ValueError for a contender that is wrong."""
    for name in contenders:
        runner = decoder_layers.kind_of(kind)(small(family), kind, 2, tokens).runner(decoder_layers.CONTENDERS[name])
        runner.check(0)
        if kind == decoder_layers.PREFILLS:
            assert len({runner.call().shape for _ in range(3)}) == 3
        if tilescale.init().rank == 0:
            print("passed", family.name, kind, tokens, name, flush=True)


if __name__ == "__main__":
    tilescale.init()
    dist.init_process_group("gloo")
    trials.device = lambda: torch.device("cpu")
    for each in FAMILIES:
        check(each, "training_step", 16, "tilescale")
    first = FAMILIES[0]
    check(first, "training_step", 16, "torch", "tilescale, gathered kept")
    check(first, "prefill", 7, "tilescale")
    check(first, decoder_layers.PREFILLS, 7, "torch", "tilescale")
    check(FAMILIES[3], "prefill", 16, "torch", "tilescale")
    check(first, "decode", 1, "torch", "tilescale")
