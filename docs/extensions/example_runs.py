# SPDX-License-Identifier: MIT
"""Runs the examples, emulated, for what they print and for their timelines."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]


def run_examples(programs: Sequence[Path], folder: Path) -> Iterator[str]:
    """Run those whose output in `folder` is older than the source; give the name of each."""
    sources = [path for top in ("tilescale", "tilelang_core", "examples") for path in (ROOT / top).rglob("*.py")]
    newest = max(path.stat().st_mtime for path in sources)
    for program in programs:
        yield program.stem
        number = program.stem[:2]
        output = folder / f"{number}.txt"
        if not output.exists() or output.stat().st_mtime < newest:
            printed = run(program, folder / f"{number}-run.svg")
            output.write_text(printed.replace(f"{folder}/{number}-", ""), encoding="utf-8")


def run(program: Path, timeline: Path) -> str:
    """What a program prints with its own defaults; programs after the first draw to `timeline` with a number."""
    output = io.StringIO()
    here = patch.object(sys, "path", [str(program.parent), *sys.path])
    with here, patch.dict("os.environ", COLUMNS="100"):
        spec = importlib.util.spec_from_file_location(program.stem, program)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with contextlib.redirect_stdout(output):
            module.main(["--timeline", str(timeline)], standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines()).lstrip("\n")
