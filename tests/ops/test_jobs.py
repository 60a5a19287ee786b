# SPDX-License-Identifier: MIT
"""Operators in jobs of several processes. Starting one takes seconds, so a job checks many things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.comm.conftest import command, run_words
from tests.ops.test_operator_contracts import CASES

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"
EMULATED = {"TILESCALE_TIMEOUT_S": "50", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
"""The programs themselves are checked elsewhere."""


@pytest.mark.parametrize("name", ["operators.py", "norms.py", "results.py", "moves.py", "experts.py"])
def test_operators_of_two_ranks(name: str):
    """See scripts/operators.py, norms.py, results.py, moves.py and experts.py for what is checked."""
    script = SCRIPTS / name
    done = run_words([*command("tilescale run", 2), str(script)], **EMULATED)
    assert done.code == 0, done.output
    checks = re.findall(r"^def (check_\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"passed (\w+)", done.output) == checks


def test_operators_are_what_they_are_registered_as():
    """See scripts/contracts.py."""
    done = run_words([*command("tilescale run", 2), str(SCRIPTS / "contracts.py")], **EMULATED)
    assert done.code == 0, done.output
    assert re.findall(r"passed (\w+)", done.output) == [*CASES]


@pytest.mark.nightly
def test_graphs_are_found_again_by_ranks_that_they_are_of(tmp_path: Path):
    """See scripts/cached_graphs.py."""
    for size in (1, 2):
        words = [*command("tilescale run", size), str(SCRIPTS / "cached_graphs.py")]
        done = run_words(words, **EMULATED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.code == 0 and done.output.count("passed") == size, done.output


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly), 5])
def test_messages_between_ranks(size: int):
    """See scripts/messages.py."""
    script = SCRIPTS / "messages.py"
    done = run_words([*command("tilescale run", size), str(script)], **EMULATED)
    assert done.code == 0, done.output
    checks = re.findall(r"^def (check_\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"passed (\w+)", done.output) == checks


def test_models_whose_experts_lie_over_the_ranks():
    """See scripts/expert_models.py."""
    pytest.importorskip("transformers")
    done = run_words([*command("tilescale run", 2), str(SCRIPTS / "expert_models.py")], **EMULATED)
    assert done.code == 0, done.output
    assert re.findall(r"passed (\w+)", done.output) == ["Mixtral", "Qwen3Moe", "DeepseekV3", "FP8Experts", "Float8"]


def test_a_model_decodes_over_the_ranks():
    """See scripts/decode_step.py."""
    pytest.importorskip("transformers")
    done = run_words([*command("tilescale run", 2), str(SCRIPTS / "decode_step.py")], **EMULATED)
    assert done.code == 0 and done.output.count("passed") == 2, done.output


def test_a_parallel_model_learns_as_the_plain_one():
    """See scripts/llama.py."""
    done = run_words([*command("tilescale run", 2), str(SCRIPTS / "llama.py")], **EMULATED)
    assert done.code == 0, done.output
    assert "passed" in done.output


def test_any_number_of_tokens_and_sequences_is_split_over_the_ranks():
    """See scripts/sequences.py."""
    pytest.importorskip("transformers")
    done = run_words([*command("tilescale run", 2), str(SCRIPTS / "sequences.py")], **EMULATED)
    assert done.code == 0 and done.output.count("passed") == 2, done.output


@pytest.mark.parametrize("options", ["some", pytest.param("all", marks=pytest.mark.nightly)])
def test_training_with_fsdp_over_the_other_dimension_of_a_mesh(options: str):
    """See scripts/training.py."""
    script = SCRIPTS / "training.py"
    done = run_words([*command("tilescale run", 4), str(script), options], **EMULATED)
    assert done.code == 0, done.output
    checks = re.findall(r"^def (check_\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"passed (\w+)", done.output) == checks


def test_slices_of_a_mesh():
    """See scripts/slices.py."""
    done = run_words([*command("tilescale run", 4), str(SCRIPTS / "slices.py")], **EMULATED)
    assert done.code == 0 and done.output.count("passed") == 4, done.output


def test_a_call_that_one_rank_refuses():
    """See scripts/refused.py."""
    done = run_words([*command("tilescale run", 3), str(SCRIPTS / "refused.py")], **EMULATED)
    assert done.code == 0 and done.output.count("passed") == 3, done.output
