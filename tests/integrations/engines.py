# SPDX-License-Identifier: MIT
"""Plugins, communicator and fused all-reduce against the real code of vLLM, SGLang and FlashInfer, as far as it runs
without GPUs: `make test-integrations`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.comm.conftest import command, run_words

EMULATED = {"TILESCALE_TIMEOUT_S": "100", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "flashinfer"])
def test_calls_of_the_engine(engine: str):
    words = [*command("tilescale run", 2), str(SCRIPTS / f"{engine}_calls.py")]
    done = run_words(words, PYTHONPATH=os.environ["PYTHONPATH"], **EMULATED)
    if "skipped: " in done.output:
        pytest.skip(done.output.partition("skipped: ")[2].splitlines()[0])
    assert done.code == 0 and done.output.count("passed") == 2, done.output
