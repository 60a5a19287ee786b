# SPDX-License-Identifier: MIT
"""The mutation score: how many small mistakes in synchronisation the tests catch.

    python -m tests.mutation.run [--each N] [--left] [PART OF A PATH ...]

mutates the files of `targets.py`, or those whose path has one of the words, in a copy of the tree; N places of each,
drawn at random but always the same, or all; with `--left` those alone that no test has caught before. For each mutant
the tests of its file run, and its result goes to benchmarks/results/mutants.json at once. What is heavy to load is
loaded once, and each mutant is a forked process. It is caught if a test fails; tests that do not end within the limits
are a result of their own, a timeout.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutation.table import CAUGHT, RESULTS, SURVIVES, TIMEOUT, tables
from tests.mutation.targets import ROOT, TARGETS, Target

CPU_LIMIT_S, LIMIT_S = 120, 900
"""Limits of CPU and wall-clock time for the tests of one mutant, which may wait: many times their usual time."""


def measured(
    target: Target, tree: Path, count: int | None = None, known: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Mutants of a file, and the outcome of each; those that are `known` to be caught are not tried again."""
    path = tree / target.path
    original = path.read_text(encoding="utf-8")
    for test in target.tests:
        assert _passes(test, tree), f"{test} fails without a mutant"
    mutants = list(target.mutants())
    if count is not None and count < len(mutants):
        mutants = sorted(random.Random(0).sample(mutants, count), key=lambda mutant: mutant.line)
    for mutant in mutants:
        path.write_text(mutant.text, encoding="utf-8")
        outcome = CAUGHT if mutant.what in known else outcome_of(target.tests, tree)
        print(f"{outcome:8}", f"{target.path}:{mutant.line}", mutant.what, flush=True)
        yield {"line": mutant.line, "what": mutant.what, "outcome": outcome}
    path.write_text(original, encoding="utf-8")


@cache
def _passes(test: str, tree: Path) -> bool:
    return outcome_of((test,), tree) == SURVIVES


def outcome_of(tests: tuple[str, ...], tree: Path) -> str:
    """Verdict of the tests on a tree: it survives if all pass, is caught if one fails, a timeout if they do not end."""
    child = multiprocessing.get_context("fork").Process(target=_test, args=(tests, tree))
    child.start()
    child.join(LIMIT_S)
    is_late = child.is_alive()
    child.kill()
    child.join()
    if is_late or child.exitcode == -signal.SIGXCPU:
        return TIMEOUT
    return CAUGHT if child.exitcode else SURVIVES


def _test(tests: tuple[str, ...], tree: Path) -> None:
    """Run pytest in a separate process, which exits with its code."""
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    # One failing example is enough, without the smallest one; and a slow machine is not a failure.
    phases, ignored = [Phase.explicit, Phase.generate], list(HealthCheck)
    settings.register_profile("found", phases=phases, suppress_health_check=ignored, database=None)
    settings.load_profile("found")
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    alone = "-p", "no:cacheprovider", "--rootdir", str(tree)
    os._exit(int(pytest.main(["-x", "-q", *alone, *tests])))


def _copied(folder: Path) -> Path:
    """A copy of what git has, and of files that it does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    compileall.compile_dir(folder, quiet=2)  # once for all mutants, which leave no bytecode
    return folder


def _always_caught(rows: Collection[Mapping[str, Any]]) -> set[str]:
    """Changes that were caught, at any line of a file, as lines move."""
    return {row["what"] for row in rows} - {row["what"] for row in rows if row["outcome"] != CAUGHT}


def main() -> None:
    """Measure the files that are meant, and put them into the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of the paths that are meant; all without")
    parser.add_argument("--each", type=int, help="how many mutants of each file; all without")
    parser.add_argument("--left", action="store_true", help="only those that no test has caught before")
    given = parser.parse_args()
    for heavy in ("hypothesis", "pytest", "networkx", "tilelang"):
        importlib.import_module(heavy)
    with tempfile.TemporaryDirectory() as folder:
        tree = _copied(Path(folder))
        for target in TARGETS:
            if not given.words or any(word in target.path for word in given.words):
                known = _always_caught(_results().get(target.path, ())) if given.left else ()
                rows = []
                for row in measured(target, tree, given.each, known):
                    rows.append(row)
                    merged = json.dumps({**_results(), target.path: rows}, indent=1)
                    RESULTS.write_text(merged + "\n", encoding="utf-8")
    print(tables(_results())["mutants"])


def _results() -> dict[str, list[dict[str, Any]]]:
    """Those so far, of other runs too."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
