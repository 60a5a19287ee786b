# SPDX-License-Identifier: MIT
"""The mutation score: how many small mistakes in synchronisation the tests catch.

    python -m tests.mutation.run [--each N] [--left] [PART OF A PATH ...]

mutates the files of `targets.py`, or those whose path has one of the words, in a copy of the tree; N places of each,
drawn at random but always the same, or all; with `--left` those alone that no test has caught before. For each mutant
the tests of its file run, and the results of a file go to benchmarks/results/mutants.json together. A mutant is caught
if a test fails; tests that do not end within the limits are a result of their own, a timeout.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.mutation.session import Session, outcome_of
from tests.mutation.table import CAUGHT, RESULTS, tables
from tests.mutation.targets import ROOT, TARGETS, Target


def measured(
    target: Target, tree: Path, count: int | None = None, known: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Mutants of a file, and the outcome of each; those that are `known` to be caught are not tried again."""
    path = tree / target.path
    original = path.read_text(encoding="utf-8")
    mutants = list(target.mutants())
    if count is not None and count < len(mutants):
        mutants = sorted(random.Random(0).sample(mutants, count), key=lambda mutant: mutant.line)
    session = Session(target.tests, path, tree)
    assert session.passes, f"tests of {target.path} fail without a mutant"
    for mutant in mutants:
        path.write_text(mutant.text, encoding="utf-8")
        outcome = CAUGHT if mutant.what in known else session.outcome(mutant.line, mutant.text)
        if outcome is None:
            outcome = outcome_of(target.tests, tree)
        print(f"{outcome:8}", f"{target.path}:{mutant.line}", mutant.what, flush=True)
        yield {"line": mutant.line, "what": mutant.what, "outcome": outcome}
    session.close()
    path.write_text(original, encoding="utf-8")


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and remove the copy
    for heavy in ("networkx", "tilelang"):
        importlib.import_module(heavy)
    with tempfile.TemporaryDirectory() as folder:
        tree = _copied(Path(folder))
        for target in TARGETS:
            if not given.words or any(word in target.path for word in given.words):
                before = _results().get(target.path, {"tried": ()})
                known = _always_caught(before["tried"]) if given.left else ()
                rows = list(measured(target, tree, given.each, known))
                _keep(target.path, {"of": len(list(target.mutants())), "tried": rows})
    print(tables(_results())["mutants"])


def _results() -> dict[str, dict[str, Any]]:
    """Those so far, of other runs too."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def _keep(path: str, results: Mapping[str, Any]) -> None:
    """Put the results of a file in place of its last ones, at once."""
    text = json.dumps({**_results(), path: results}, indent=1) + "\n"
    whole = RESULTS.with_suffix(".new")
    whole.write_text(text, encoding="utf-8")
    whole.replace(RESULTS)


if __name__ == "__main__":
    main()
