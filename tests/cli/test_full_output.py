# SPDX-License-Identifier: MIT
"""An output that takes no more is an error of one line, in every command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is missing")
@pytest.mark.parametrize("words", ["machine list", "--help"])
def test_a_full_disk(words: str):
    with FULL.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tilescale.cli", *words.split()], stdout=output, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"
