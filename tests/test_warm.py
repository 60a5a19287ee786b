# SPDX-License-Identifier: MIT
"""Processes that are forked from one with torch and TileLang loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm


@pytest.mark.parametrize("kind", ["rank", "worker"])
def test_forked_processes_start_others_of_their_kind(kind: str):
    """Ranks start forked processes too; the tests of workers start Python itself."""
    program = warm.python() if kind == "rank" else warm.worker(())
    shown = "import sys; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([program, "-c", shown], capture_output=True, text=True, timeout=100)
    executable = program if kind == "rank" else sys.executable
    assert done.stdout.split() == [executable, str(program != sys.executable)], done.stderr


def test_modules_that_fail_are_not_kept(tmp_path: Path):
    """A worker would collect the tests above the failure, and report nothing."""
    for name, end in ("test_whole", ""), ("test_broken", "raise RuntimeError('a mistake')"):
        (tmp_path / f"{name}.py").write_text(f"def test_first(): pass\n{end}\ndef test_last(): pass\n")
    script = f"""
import sys
from tests.warm.server import load
load(["--import-mode=importlib", {str(tmp_path)!r}])
print(*sorted(name for name in sys.modules if name.rpartition(".")[2] in ("test_whole", "test_broken")))
"""
    done = subprocess.run([warm.python(), "-c", script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.stdout.split() == ["test_whole"], done.stderr


def test_settings_are_those_of_the_environment():
    shown = "from tilescale.settings import settings; print(settings().timeout_s)"
    for seconds in "7", "9":
        given = {"TILESCALE_TIMEOUT_S": seconds}
        done = subprocess.run([warm.python(), "-c", shown], env=given, capture_output=True, text=True, timeout=100)
        assert float(done.stdout) == float(seconds), done.stderr
