# SPDX-License-Identifier: MIT
"""The GPU verification's jobs without a GPU: counts of checks, failures, and the file of outcomes."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    return importlib.import_module("gpu_check")


def job(check: ModuleType, tmp_path: Path, name: str, said: str, code: int = 0, ranks: int = 2):
    command = [sys.executable, "-c", f"print({said!r}); raise SystemExit({code})"]
    return check.run(check.Step(name, command, 20), tmp_path / "log", ranks)


@pytest.mark.parametrize(
    ("said", "code", "ok", "counts", "failures"),
    [
        ("PASS a\nPASS b", 0, True, (2, 0, 0), []),
        ("PASS a\nFAIL b: wrong", 0, False, (1, 1, 0), ["FAIL b: wrong"]),
        ("5 passed, 2 skipped in 3 s", 0, True, (5, 0, 2), []),
        (
            "PASS a\nx.py FAILED\ntraceback : Signal 6 (SIGABRT)", 1, False, (1, 1, 0),
            ["x.py FAILED", "traceback : Signal 6 (SIGABRT)"],
        ),
        ("PASS a\nkilled", 3, False, (1, 0, 0), ["exit code 3", "PASS a", "killed"]),
    ],
)  # fmt: skip
def test_a_jobs_checks_are_counted(
    check: ModuleType, tmp_path: Path, said: str, code: int, ok: bool, counts: tuple[int, ...], failures: list[str]
):
    outcome = job(check, tmp_path, "a step", said, code)
    assert (outcome.ok, (outcome.passed, outcome.failed, outcome.skipped)) == (ok, counts)
    assert outcome.failures == failures


def test_outcomes_replace_those_of_the_same_step_and_ranks(check: ModuleType, tmp_path: Path):
    path = tmp_path / "gpu_checks.json"
    check.write([job(check, tmp_path, "one", "PASS"), job(check, tmp_path, "two", "PASS")], path)
    check.write([job(check, tmp_path, "one", "PASS\nPASS"), job(check, tmp_path, "one", "FAIL", ranks=4)], path)
    result = json.loads(path.read_text())
    assert result["machine"] == {"gpu": "a GPU", "gpus": 2}
    assert {(row["name"], row["ranks"], row["gpus"], row["passed"]) for row in result["rows"]} == {
        ("one", 2, 2, 2), ("one", 4, 2, 0), ("two", 2, 2, 1),
    }  # fmt: skip


def test_every_script_of_checks_is_a_step(check: ModuleType):
    commands = [word for step in check.steps(2, shared=False) for word in step.command]
    scripts = [path.name for path in (BENCHMARKS.parent / "tests/gpu").glob("*.py") if "__main__" in path.read_text()]
    assert scripts and all(f"tests/gpu/{name}" in commands for name in scripts)
    assert "100" in commands  # random programs, next to other jobs


def test_jobs_do_not_outlive_the_verification(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    monkeypatch.setattr(check.os, "_exit", codes.append)
    step = check.Step("long", [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"], 50)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(check.run, step, tmp_path / "log", 2)
        while "begun" not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            time.sleep(0.01)
        check.end()
        assert outcome.result().failures[0] == "exit code -15"
    assert codes == [143]


@pytest.mark.parametrize("path", sorted((BENCHMARKS.parent / "tests/gpu").glob("*.py")), ids=lambda path: path.name)
def test_scripts_import_tvm_behind_tilelang_which_ships_it(path: Path):
    imports = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports]
    packages = [name.split(".")[0] for name in names]
    behind = next((i for i, name in enumerate(packages) if name in ("tilelang", "tilescale")), len(packages))
    assert "tvm" not in packages[:behind]
