# SPDX-License-Identifier: MIT
"""Run TileLang's examples and tests through TileScale without a GPU, and tabulate the outcomes.

    python benchmarks/upstream_examples.py ~/tilelang --only gemm  # files whose path contains this
    python benchmarks/upstream_examples.py ~/tilelang --left       # files not run so far
    python benchmarks/upstream_examples.py ~/tilelang --table      # write the table of all results so far

The first argument is a checkout of TileLang's repository. Each file of tests runs in a separate process, see
`upstream_pretence.py`. Results are added to those of earlier runs, in benchmarks/results/upstream_examples.json; the
table is docs/upstream.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "upstream_examples.json"
PAGE = ROOT / "docs" / "upstream.md"
FOLDERS = ("examples", *(f"testing/python/{name}" for name in (
    "language", "kernel", "issue", "tilelibrary", "math", "fastmath", "cuda", "")))  # fmt: skip
"""Folders of tests; tests of programs first, before those of TileLang's passes, caches and tools."""

FILE_TESTS = 4
"""Limit of the CPU time of a file, in limits of one test."""

LEFT_OUT = ("examples/amd", "examples/aws", *(f"testing/python/{name}/" for name in (
    "amd", "cpu", "llvm", "metal", "webgpu")))  # fmt: skip
"""Tests of other back ends."""

BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def files(checkout: Path, only: str) -> Iterator[Path]:
    """Files of tests, examples first."""
    paths = dict.fromkeys(path for folder in FOLDERS for path in sorted((checkout / folder).rglob("test_*.py")))
    for path in paths:
        name = path.relative_to(checkout).as_posix()
        if only in name and not name.startswith(LEFT_OUT):
            yield path


def run(path: Path, checkout: Path, arch: str, seconds: int) -> list[dict[str, Any]]:
    """Run the tests of one file; return their results."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records")
        ours = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), ".", os.environ.get("PYTHONPATH", "")])
        settings = {"PYTHONPATH": ours, "TILESCALE_EMULATE": "1", "UPSTREAM_RECORDS": str(records)}
        settings |= {"UPSTREAM_ARCH": arch, "UPSTREAM_TEST_S": str(seconds), "TILELANG_CACHE_DIR": folder}
        options = ["-q", "-p", "upstream_pretence", "-p", "no:cacheprovider", "--rootdir", str(checkout), path.name]
        limit = FILE_TESTS * seconds
        try:
            done = subprocess.run(
                ["prlimit", f"--cpu={limit}", sys.executable, "-m", "pytest", *options], cwd=path.parent,
                env={**os.environ, **settings}, capture_output=True, text=True, timeout=4 * limit, check=False,
            )  # fmt: skip
            last = (done.stdout.strip().splitlines() or [""])[-1] if done.returncode >= 0 else "ended by its limit"
        except subprocess.TimeoutExpired:
            last = "ended by its limit"
        print(f"{path.relative_to(checkout)}: {last}", flush=True)
        lines = records.read_text().replace(f"{checkout.resolve()}/", "").splitlines() if records.exists() else []
    return [json.loads(line) for line in lines]


def kept(results: dict[str, Any], record: dict[str, Any]) -> None:
    """Put a test's result in place of its last one."""
    row = results["tests"][record["test"]] = {key: record[key] for key in ("outcome", "seconds")}
    if detail := record["detail"].strip().splitlines()[:3]:
        row["detail"] = detail
    if texts := Counter(text["text"] for text in record["texts"]):
        row["texts"] = dict(texts)
    if unequal := [text for text in record["texts"] if text["text"] != "equal"]:
        row["not equal"] = [{key: text[key] for key in ("kernel", "text", "error") if key in text} for text in unequal]


# -- the table ---------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """Format the results as Markdown: tests of examples one by one, other tests by file."""
    tests = results["tests"]
    examples = {name: row for name, row in tests.items() if not name.startswith("testing/")}
    lines = [
        _summary(tests),
        "",
        "| example | test | kernels | CUDA text | emulated | s |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(examples.items()):
        folder, test, texts = name.split("/")[1], name.partition("::")[2].removeprefix("test_"), row.get("texts", {})
        lines.append(
            f"| {folder} | {test} | {sum(texts.values()) or ''} | {_texts(texts)} | {_outcome(row)} | {_seconds(row)} |"
        )
    others: dict[str, list[dict[str, Any]]] = {}
    for name, row in sorted(tests.items()):
        if name.startswith("testing/"):
            others.setdefault(name.partition("::")[0].removeprefix("testing/python/"), []).append(row)
    if others:
        lines += ["", "| file of tests | tests | CUDA text | emulated |", "|---|---|---|---|"]
    for name, rows in others.items():
        texts = sum((Counter(row.get("texts", {})) for row in rows), Counter())
        outcomes = Counter(_outcome(row) for row in rows)
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if outcome)
        lines.append(f"| {name} | {len(rows)} | {_texts(texts)} | {said} |")
    return "\n".join(lines) + "\n"


def _summary(tests: dict[str, Any]) -> str:
    texts = sum((Counter(row.get("texts", {})) for row in tests.values()), Counter())
    outcomes = Counter(row["outcome"] for row in tests.values() if "outcome" in row)
    found = ", ".join(f"{count} {_WORDS.get(outcome, outcome)}" for outcome, count in outcomes.most_common())
    return f"Texts of kernels: {_counts(texts)}. Tests on the emulator: {found}."


_WORDS = {"passed": "right", "too long": "not ended in time", "skipped": "left out by the test"}


def _counts(texts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(texts.items()))


def _texts(texts: Mapping[str, int]) -> str:
    return "equal" if set(texts) == {"equal"} else _counts(texts)


def _outcome(row: dict[str, Any]) -> str:
    outcome = row.get("outcome", "")
    if outcome == "failed":
        return next(iter(row["detail"]), "").partition(":")[0]
    return _WORDS.get(outcome, outcome)


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.0f}" if "seconds" in row else ""


def write_page(results: dict[str, Any]) -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(results) + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    """Run the tests that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TileLang's repository")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--left", action="store_true", help="files not run so far")
    parser.add_argument("--arch", default="9.0", help="compute capability that tests find")
    parser.add_argument("--seconds", type=int, default=40, help="limit of the CPU time of one test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only write docs/upstream.md")
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {"files": [], "tests": {}}
    for path in () if given.table else files(given.checkout, given.only):
        name = path.relative_to(given.checkout).as_posix()
        if given.left and name in results["files"]:
            continue
        for record in run(path, given.checkout, given.arch, given.seconds):
            kept(results, record)
        results["files"] = sorted({*results["files"], name})
        given.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if given.table:
        write_page(results)


if __name__ == "__main__":
    main()
