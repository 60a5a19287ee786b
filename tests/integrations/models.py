# SPDX-License-Identifier: MIT
"""Styles of Hugging Face transformers, with its real models: `make test-integrations`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.comm.conftest import command, run_words

EMULATED = {"TILESCALE_TIMEOUT_S": "100", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
MODELS = Path(__file__).parent / "scripts/transformers_model.py"


def test_models_of_transformers_compute_train_generate_and_are_saved():
    pytest.importorskip("accelerate", reason="transformers loads with a plan where accelerate is installed")
    done = run_words([*command("tilescale run", 2), str(MODELS)], PYTHONPATH=os.environ["PYTHONPATH"], **EMULATED)
    assert done.code == 0 and done.output.count("passed") == 2, done.output
