# SPDX-License-Identifier: MIT
"""`tilescale run`: its options, its output, its exit code, its end. The ranks here need no torch, so they are quick."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.comm.conftest import ROOT, RUN, Done, command, run_words

ECHO = """
import os, sys
env = os.environ
print("out", env["RANK"], env["WORLD_SIZE"], env.get("TILESCALE_MACHINE"), env.get("TILESCALE_EMULATE"), sys.argv[1:])
print("err", file=sys.stderr)
sys.exit(int(sys.argv[1]) if env["RANK"] == "1" else 0)
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    path = tmp_path / "tool_for_run.py"
    path.write_text(ECHO)
    return path


def _run(*words: str, **variables: str) -> Done:
    return run_words([*RUN, *words], **variables)


def test_options_output_and_success(tool: Path) -> None:
    done = _run("-n", "2", "--machine", "tiny", "--emulate", str(tool), "0", "--machine", "for the script")
    assert done.code == 0
    for rank in "01":
        assert f"[{rank}] out {rank} 2 tiny 1 ['0', '--machine', 'for the script']" in done.output
        assert f"[{rank}] err" in done.output


def test_module_and_exit_code_of_the_failing_rank(tool: Path) -> None:
    done = _run("-n", "3", "-m", tool.stem, "7", PYTHONPATH=f"{ROOT}{os.pathsep}{tool.parent}")
    assert done.code == 7
    assert done.output.rstrip().endswith("rank 1 failed first, with exit code 7; its last words:\n    | err")


def test_failure_before_init_ends_the_others(run_job) -> None:
    done = run_job("tilescale run", 2, "failures.py", "early", "1")
    assert done.code == 1
    assert "ranks [0] did not stop and were ended" in done.output and "ValueError: before init" in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [*command("tilescale run", 2), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A test run in the background of a shell has SIGINT ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    pids = [int(re.findall(r"pid (\d+)", process.stdout.readline())[0]) for _ in range(2)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
