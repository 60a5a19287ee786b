# SPDX-License-Identifier: MIT
"""Families of models of transformers by plans: numbers are those of the whole models. `FAMILIES_SEED` draws others."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from tests.comm.conftest import command, run_words

pytest.importorskip("transformers")

from tests.ops.families import FAMILIES, PLANS  # noqa: E402 - it needs transformers

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts/families.py"
EMULATED = {"TILESCALE_TIMEOUT_S": "100", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
DRAW = random.Random(os.environ.get("FAMILIES_SEED", "0"))
DRAWN = {2: ["replicated:float32:qwen3", "sequence:float32:deepseek_v2"], 1: [], 4: []}
"""By the number of ranks. Those named here have parameters between sharded features."""
for _names in DRAWN.values():
    _names += [f"{plan}:float32:{DRAW.choice(list(FAMILIES))}" for plan in PLANS]


@pytest.mark.parametrize("ranks", DRAWN)
def test_families_drawn_by_a_seed(ranks: int):
    check(ranks, DRAWN[ranks])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("first", range(4))
def test_all_families(first: int, ranks: int, plan: str):
    check(ranks, [f"{plan}:float32:{name}" for name in list(FAMILIES)[first::4]])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
def test_families_in_bfloat16(plan: str):
    """Those without experts: a rounding may choose another."""
    check(2, [f"{plan}:bfloat16:{name}" for name in ("qwen3", "minicpm3", "apertus", "gemma3_text", "gpt_neox")])


def check(ranks: int, names: list[str]) -> None:
    """See scripts/families.py."""
    done = run_words([*command("tilescale run", ranks), str(SCRIPT), *names], **EMULATED)
    assert done.code == 0, done.output
    assert re.findall(r"passed (\S+)", done.output) == names
