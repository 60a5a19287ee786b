# SPDX-License-Identifier: MIT
"""make and virtual environments: it makes and updates its environment, and leaves others alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PACKAGES = "tests/integrations/packages.txt"

PYTHON = """#!/bin/sh
# Stands for Python: writes down its arguments, and `-m venv FOLDER` makes an environment with the same program. It
# cannot install what comes in files, or vllm.
echo "$@" >> {log}
for last; do :; done
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; touch "$last/pyvenv.cfg"; fi
case "$*" in *--requirement*|*vllm==*) exit 1;; esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what make needs, and a Python that only writes down what is asked of it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", PACKAGES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "stub"
    python.write_text(PYTHON.format(log=tmp_path / "log"))
    python.chmod(0o755)
    return tmp_path


def make(tree: Path, *targets: str) -> subprocess.CompletedProcess:
    words = ["make", f"PYTHON={tree / 'stub'}", *targets]
    return subprocess.run(words, cwd=tree, capture_output=True, text=True, timeout=120)


def asked(tree: Path) -> list[str]:
    log = tree / "log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("kind", ["folder", "link"])
@pytest.mark.parametrize("target", ["lint", "docs", "clean"])
def test_an_environment_of_others_stays(tree: Path, target: str, kind: str):
    theirs = tree / ".venv" if kind == "folder" else tree / "theirs"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin" / "kept").write_text("mine")
    if kind == "link":
        (tree / ".venv").symlink_to(theirs)
    done = make(tree, target)
    assert done.returncode != 0 and "was not made by make" in done.stderr
    assert (theirs / "bin" / "kept").read_text() == "mine" and (tree / ".venv").exists()
    assert not asked(tree)


def test_the_demo_runs_where_others_installed_tilescale(tree: Path):
    binaries = tree / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", "tilescale"):
        shutil.copy(tree / "stub", binaries / name)
    assert make(tree, "demo").returncode == 0
    assert asked(tree)[-1] == "examples/demo.py --to build/demo.svg"
    assert not [call for call in asked(tree) if "install" in call]


def test_the_demo_makes_an_environment_where_there_is_none(tree: Path):
    assert make(tree, "demo").returncode == 0
    assert (tree / ".venv" / ".ready").exists()
    (tree / ".venv" / ".ready").unlink()
    assert make(tree, "demo").returncode == 0
    assert (tree / ".venv" / ".ready").exists()
    other = tree / "other"
    (other / "bin").mkdir(parents=True)
    assert "was not made by make" in make(tree, "demo", f"VENV={other}").stderr


def test_an_environment_of_ours_is_made_once_and_updated(tree: Path):
    assert make(tree, "lint").returncode == 0
    (tree / ".venv" / "kept").write_text("installed later")
    (tree / ".venv" / ".ready").unlink()
    assert make(tree, "lint").returncode == 0
    assert (tree / ".venv" / "kept").exists()
    calls = asked(tree)
    assert sum(call.startswith("-m venv") for call in calls) == 1
    assert sum("--editable" in call for call in calls) == 2
    assert not [call for call in calls if "--clear" in call]
    assert make(tree, "clean").returncode == 0
    assert not (tree / ".venv").exists()


def test_another_folder_beside_an_environment_of_others(tree: Path):
    (tree / ".venv").mkdir()
    assert make(tree, "lint", "VENV=build/venv").returncode == 0
    assert (tree / "build" / "venv" / "pyvenv.cfg").exists()


def test_packages_of_engines_are_installed_once_but_for_those_that_cannot_be_had(tree: Path):
    for said in "no vllm==", "":
        done = make(tree, "test-integrations")
        assert done.returncode == 0 and done.stderr.startswith(said) and bool(done.stderr) == bool(said)
        (tree / ".venv" / ".ready").touch()
    calls = asked(tree)
    wanted = [line for line in (tree / PACKAGES).read_text().splitlines() if line and not line.startswith("#")]
    assert [call.split()[-1] for call in calls if "--no-deps" in call] == [PACKAGES, *wanted]
    assert len([call for call in calls if "pytest" in call]) == 2
