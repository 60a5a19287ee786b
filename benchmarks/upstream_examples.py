# SPDX-License-Identifier: MIT
"""Run TileLang's examples and tests through TileScale without a GPU, and tabulate the outcomes.

    python benchmarks/upstream_examples.py ~/tilelang --only gemm  # files whose path contains this
    python benchmarks/upstream_examples.py ~/tilelang --left       # files not run so far
    python benchmarks/upstream_examples.py ~/tilelang --table      # write the table of all results so far

The first argument is a checkout of TileLang's repository. Each file of tests runs in a separate process, see
`upstream_pretence.py`. Results are added to those of earlier runs, in benchmarks/results/upstream_examples.json. The
tables are in docs/compatibility.md, docs/upstream.md and docs/notes/upstream-tests.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "upstream_examples.json"
FOLDERS = ("examples", *(f"testing/python/{name}" for name in (
    "language", "kernel", "issue", "tilelibrary", "math", "fastmath", "cuda", "")))  # fmt: skip
"""Folders of tests; tests of programs first, before those of TileLang's passes, caches and tools."""

FILE_TESTS = 4
"""Limit of the CPU time of a file, in limits of one test."""

LEFT_OUT = ("examples/amd", "examples/aws", *(f"testing/python/{name}/" for name in (
    "amd", "cpu", "llvm", "metal", "webgpu")))  # fmt: skip
"""Tests of other back ends."""


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
    if detail := record["detail"].strip():
        row["detail"] = detail.splitlines()[0][:200]
    if texts := Counter(text["text"] for text in record["texts"]):
        row["texts"] = dict(texts)
    if unequal := [text for text in record["texts"] if text["text"] != "equal"]:
        row["not equal"] = [{key: text[key] for key in ("kernel", "text", "error") if key in text} for text in unequal]


# -- the tables --------------------------------------------------------------------------------------------------------

REASONS = (
    (r"Skipped: Requires CUDA compute", "for a GPU of another compute capability"),
    (r"Skipped", "left out by the test itself"),
    (r".*DID NOT RAISE", "an error of TileLang's lowering: of a plain program, text alone meets it"),
    (r".*(TILELANG_TMP_DIR|py:\d+: AttributeError|make_u?longlong4|hoisted|float2|__log|None == \[128|bit count|nan_)",
     "for a later TileLang than 0.1.15, which fails, too"),
    (r"(RaceError|OutOfBoundsError|UninitializedReadError)",
     "races, accesses out of bounds and uninitialized reads that the emulator reports"),
    (r"UnsupportedError.*(TileLang has not compiled|executable)", "the host's text: nothing is compiled without a GPU"),
    (r"UnsupportedError|NoDataError", "not emulated"),
    (r"TooLong", "not ended in time"),
    (r".*(ModuleNotFoundError|ImportError|OSError|CuTeDSL backend is not|target.build.llvm)", "another library"),
    (r".*(Auto-tuning|not compiled with CUDA|device_type mismatch|cuda device|CUDA gen|accelerator|torch.cpu|is int$)",
     "memory, streams or times of a GPU"),
    (r"AttributeError|KeyError", "attributes of TileLang's kernels that ours lack"),
    (r"(Failed|Assertion|Value|Usage)", "another error, text or value than the test expects"),
)  # fmt: skip
"""Beginnings of details of tests that are not right, and the class of each."""


def reason(row: Mapping[str, Any]) -> str:
    """The class of a test that is not right."""
    if row["outcome"] == "not begun":
        return "not begun when the file reached its limit"
    return next((name for pattern, name in REASONS if re.match(pattern, row.get("detail", ""))), "other errors")


def examples_table(tests: Mapping[str, Any]) -> str:
    """Format the results of examples as Markdown, test by test."""
    lines = ["| example | test | kernels | CUDA text | emulated | s |", "|---|---|---|---|---|---|"]
    for name, row in sorted(tests.items()):
        if name.startswith("examples/"):
            folder, test, texts = name.split("/")[1], name.partition("::")[2], row.get("texts", {})
            cells = folder, test.removeprefix("test_"), str(sum(texts.values()) or ""), _texts(texts), _outcome(row)
            lines.append(f"| {' | '.join(cells)} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def tests_table(tests: Mapping[str, Any]) -> str:
    """Format the results of TileLang's own tests as Markdown, file by file."""
    files: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in sorted(tests.items()):
        if name.startswith("testing/"):
            files.setdefault(name.partition("::")[0].removeprefix("testing/python/"), []).append(row)
    lines = ["| file of tests | tests | CUDA text | emulated | s |", "|---|---|---|---|---|"]
    for name, rows in files.items():
        texts = sum((Counter(row.get("texts", {})) for row in rows), Counter())
        said = _counts(Counter(map(_outcome, rows)))
        lines.append(f"| {name} | {len(rows)} | {_texts(texts)} | {said} | {sum(row['seconds'] for row in rows):.0f} |")
    return "\n".join(lines)


def summary_table(tests: Mapping[str, Any]) -> str:
    """Format the number of tests by result, and of texts of kernels, as Markdown."""
    sides = [[row for name, row in tests.items() if name.startswith(side)] for side in ("examples/", "testing/")]
    results = [Counter(map(_class, rows)) for rows in sides]
    texts = [sum((Counter(row.get("texts", {})) for row in rows), Counter()) for rows in sides]
    lines = ["| | of examples | of tests |", "|---|---|---|"]
    for head, (one, other) in (("result", results), ("CUDA text of a kernel", texts)):
        for word, _ in (one + other).most_common():
            lines.append(f"| {head}: {word} | {one[word] or ''} | {other[word] or ''} |")
    return "\n".join(lines)


def _class(row: Mapping[str, Any]) -> str:
    return "right" if row["outcome"] == "passed" else reason(row)


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(numbers.items()))


def _texts(texts: Mapping[str, int]) -> str:
    return "equal" if set(texts) == {"equal"} else _counts(texts)


def _outcome(row: Mapping[str, Any]) -> str:
    words = {"passed": "right", "too long": "not ended in time", "skipped": "left out"}
    if row["outcome"] == "failed":
        return row["detail"].partition(":")[0]
    return words.get(row["outcome"], row["outcome"])


PAGES = {
    "docs/compatibility.md": {"upstream": summary_table},
    "docs/upstream.md": {"results": examples_table},
    "docs/notes/upstream-tests.md": {"tests": tests_table},
}
"""Pages, and their tables."""


def pages(tests: Mapping[str, Any]) -> dict[Path, str]:
    """The pages with the tables of results."""
    made: dict[Path, str] = {}
    for name, tables in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for mark, table in tables.items():
            pattern = rf"<!-- {mark} -->\n\n(\|[^\n]*\n)*"
            text = re.sub(pattern, lambda _, m=mark, t=table: f"<!-- {m} -->\n\n{t(tests)}\n", text)
        made[ROOT / name] = text
    return made


def main() -> None:
    """Run the tests that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TileLang's repository")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--left", action="store_true", help="files not run so far")
    parser.add_argument("--arch", default="9.0", help="compute capability that tests find")
    parser.add_argument("--seconds", type=int, default=40, help="limit of the CPU time of one test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the tables of the pages")
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {"files": [], "tests": {}}
    for path in () if given.table else files(given.checkout, given.only):
        name = path.relative_to(given.checkout).as_posix()
        if given.left and name in results["files"]:
            continue
        records = run(path, given.checkout, given.arch, given.seconds)
        results["tests"] = {test: row for test, row in results["tests"].items() if test.partition("::")[0] != name}
        for record in records:
            kept(results, record)
        results["files"] = sorted({*results["files"], name})
        given.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if given.table:
        for page, text in pages(results["tests"]).items():
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
