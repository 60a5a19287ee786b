# SPDX-License-Identifier: MIT
"""Kernel calls in jobs of several processes. Starting one takes seconds, so a job checks many things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.comm.conftest import command, run_words

SCRIPTS = Path(__file__).parent / "scripts"


def test_calls_of_four_ranks():
    """See scripts/spmd.py for what is checked."""
    script = SCRIPTS / "spmd.py"
    done = run_words([*command("tilescale run", 4), str(script)], TILESCALE_TIMEOUT_S="30")
    assert done.code == 0, done.output
    checks = re.findall(r"^def (check_\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"passed (\w+)", done.output) == checks


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", r"rank 1 .*ended before it came to kernel\(\)"),
        ("killed", "rank 1 .*disappeared: it was killed, has crashed, or its host is out of reach"),
    ],
)
def test_a_rank_that_ends_before_the_call_ends_the_job(how: str, said: str):
    done = run_words([*command("tilescale run", 3), str(SCRIPTS / "ends_early.py"), how])
    assert done.code != 0
    assert "reached the end" not in done.output
    for rank in (0, 2):
        assert re.search(rf"\[{rank}\] .*RankFailedError: {said}", done.output), done.output
    assert "ends_early.py" in done.output and "kernel(torch.zeros(64)" in done.output
