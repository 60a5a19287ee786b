# SPDX-License-Identifier: MIT
"""Models of the benchmark run here: their contenders agree with the model in one process."""

from pathlib import Path

import pytest

from tests.comm.conftest import command, run_words

SCRIPT = Path(__file__).parent / "ops" / "scripts" / "models.py"


def test_contenders_are_right():
    """See ops/scripts/models.py."""
    pytest.importorskip("transformers")
    variables = {"TILESCALE_TIMEOUT_S": "50", "TILESCALE_EMULATE": "1", "TILESCALE_CHECK": "none"}
    done = run_words([*command("tilescale run", 2), str(SCRIPT)], **variables)
    assert done.code == 0 and done.output.count("passed") == 5 + 2 + 1 + 2 + 2 + 2, done.output
