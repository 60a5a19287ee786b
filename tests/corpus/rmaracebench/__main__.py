# SPDX-License-Identifier: MIT
"""Run RMARaceBench's OpenSHMEM programs on the emulator, as TileScale programs.

    git clone --branch v1.2.0 https://github.com/RWTH-HPC/RMARaceBench
    python -m tests.corpus.rmaracebench RMARaceBench

Each program of SHMEM/ is translated by the rules of docs/notes/rmaracebench.md, and emulated with all checks: in the
order that a run has by itself, and in others. A racy program counts as found where a RaceError names the two lines of
its label, a correct one as silent where nothing is raised. Printed is every program that is not as labelled, or has
no translation, and a table of all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tilescale
from tests.corpus.rmaracebench import c, execute, program, table
from tilescale.errors import RaceError, TileScaleError

_LABEL = re.compile(r"RACE LABELS BEGIN\s*/\*(.*?)\*/", re.DOTALL)


def outcome(source: Path, folder: Path, orders: int) -> dict[str, Any]:
    """Verdict of the emulator on a program of the benchmark.

    Args:
        source: the C file.
        folder: where its translation is written.
        orders: number of further orders of its units in which it runs.
    """
    text = source.read_text(encoding="utf-8")
    label = json.loads(_LABEL.search(text)[1])
    lines = {int(access.rpartition("@")[2]) for access in label.get("RACE_PAIR", ())}
    row = {"racy": label["RACE_KIND"] != "none", "reason": None, "orders": orders}
    try:
        world = execute.translated(c.parse(text), label["NPROCS"])
    except (program.InexpressibleError, SyntaxError) as error:
        return {**row, "reason": str(error)}
    path = folder / f"{source.parent.name}_{source.stem.replace('-', '_')}.py"
    path.write_text(world.text(), encoding="utf-8")
    function = program.load(path)
    first, *others = (_lines(function, world, path, seed) == lines for seed in (None, *range(orders)))
    return {**row, "own order": first, "other orders": sum(others)}


def _lines(function: Any, world: program.World, path: Path, seed: int | None) -> set[int]:
    """The lines of C whose race is reported; none if nothing is, and 0 for another error."""
    try:
        tilescale.emulate(function, world.arguments(), check="all", time=False, schedule_seed=seed)
    except RaceError as error:
        return {program.line_of_c(path, where.line) for where in error.where}
    except TileScaleError:
        return {0}
    return set()


def _version(checkout: Path) -> dict[str, str]:
    """The benchmark's tag and commit."""
    asked = {"version": ("describe", "--tags"), "commit": ("rev-parse", "HEAD")}
    run = {what: ["git", "-C", str(checkout), *words] for what, words in asked.items()}
    return {what: subprocess.check_output(words, text=True).strip() for what, words in run.items()}


def main() -> None:
    """Translate, run and count."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.corpus.rmaracebench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, help="a clone of the benchmark")
    parser.add_argument(
        "--orders", type=int, default=20, help="further orders of execution of each program (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="run programs with this in their names, such as sync/01")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="programs that run at once (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, help="a folder to write the translated programs to, to look at them")
    parser.add_argument("--record", action="store_true", help=f"write {table.RESULTS.name}, of which the page is made")
    given = parser.parse_args()
    sources = {f"{source.parent.name}/{source.stem}": source for source in sorted(given.checkout.glob("SHMEM/*/*.c"))}
    sources = {name: source for name, source in sources.items() if given.only in name}
    pool = ProcessPoolExecutor(given.jobs, initializer=torch.set_num_threads, initargs=(1,))
    with tempfile.TemporaryDirectory() as temporary, pool:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = pool.map(partial(outcome, folder=folder, orders=given.orders), sources.values())
        rows = dict(zip(sources, found, strict=True))
    if given.record:
        table.write(_version(given.checkout), rows)
    for name, text in table.tables({"programs": rows}).items():
        print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main()
