# SPDX-License-Identifier: MIT
"""Failed waits in jobs of several processes, with devices that are threads: see scripts/guarded.py."""

from __future__ import annotations

import re
from pathlib import Path

from tests.comm.conftest import command, run_words

SCRIPT = Path(__file__).parent / "scripts" / "guarded.py"


def run(size: int, *words: str):
    environment = {"TILESCALE_HEAP": "host", "TILESCALE_EMULATE": "1"}
    return run_words([*command("tilescale run", size), str(SCRIPT), *words], **environment)


def test_a_job_goes_on_after_failed_waits():
    done = run(3)
    assert done.code == 0, done.output
    assert len(re.findall("survived", done.output)) == 3


def test_a_rank_that_is_killed_in_a_kernel_ends_the_others_waits():
    done = run(2, "0")  # the rank that has the job's store
    assert len(re.findall("noticed", done.output)) == 1, done.output
    assert done.code != 0
