# SPDX-License-Identifier: MIT
"""Plugins, communicator and fused all-reduce against the real code of vLLM, SGLang and FlashInfer, as far as it runs
without GPUs: `make test-integrations`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.comm.conftest import Done, command, run_words

EMULATED = {"TILESCALE_TIMEOUT_S": "100", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
SCRIPTS = Path(__file__).parent / "scripts"


def run(words: list[str], **variables: str) -> Done:
    """Output of a script; skipped if its output asks for it."""
    done = run_words(words, PYTHONPATH=os.environ["PYTHONPATH"], **variables)
    if "skipped: " in done.output:
        pytest.skip(done.output.partition("skipped: ")[2].splitlines()[0])
    assert done.code == 0, done.output
    return done


@pytest.mark.parametrize("engine", ["vllm", "sglang", "flashinfer"])
def test_calls_of_the_engine(engine: str):
    words = [*command("tilescale run", 2), str(SCRIPTS / f"{engine}_calls.py")]
    done = run(words, **EMULATED, TILESCALE_PLUGIN="1")
    assert done.output.count("passed") == 2, done.output


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_asked_stays_as_it_is(engine: str):
    done = run([sys.executable, str(SCRIPTS / "not_asked.py"), engine], TILESCALE_PLUGIN="")
    assert "passed" in done.output, done.output
