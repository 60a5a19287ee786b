# SPDX-License-Identifier: MIT
"""Correct programs of the corpus without one wait or signal, and again with the line that the error's hint proposes.

    python -m tests.corpus.repair

prints the outcome of each.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.corpus.collection import PROGRAMS
from tests.corpus.measure import same
from tests.corpus.record import Bench, Outcome, Program

_SIGNAL = re.compile(r", signal=\w+\[[^]]*\]")
_HINT = re.compile(r"^add (T\.\w+\(.*?\)) (before|after) line (\d+);")
_numbers = itertools.count()


@dataclass(frozen=True)
class Repair:
    """Outcome for a program without one line.

    Attributes:
        line: that was left out, or changed.
        found: whether a check reported the mistake, and `hinted` whether the error proposes an exact remedy.
        right: whether the program with the remedy is without error and leaves the values of the right one.
    """

    program: str
    line: str
    error: str
    hint: str
    found: bool
    hinted: bool
    right: bool


def candidates() -> Iterator[Program]:
    """Right programs with a wait and a signal, one variant each."""
    seen = set()
    for program in PROGRAMS:
        text = inspect.getsource(program.make)
        if program.error is None and program.make not in seen and "T.wait" in text and "ignal" in text:
            seen.add(program.make)
            yield program


def repairs(program: Program, folder: Path) -> Iterator[Repair]:
    """For each wait and signal of a program, the outcome without it, and with the remedy."""
    lines = Path(inspect.getfile(program.make)).read_text(encoding="utf-8").splitlines()
    own, first = inspect.getsourcelines(program.make)
    wanted = Bench(program).run(None)
    for number in range(first - 1, first - 1 + len(own)):
        changed = _without(lines[number])
        if changed is None:
            continue
        broken = [*lines[:number], changed, *lines[number + 1 :]]
        outcome = _run(program, broken, folder)
        if outcome.error is None:
            continue
        hint = outcome.error.hint or ""
        stated = _HINT.match(hint)
        right = False
        if stated:
            mended = _run(program, _added(broken, *stated.groups()), folder)
            right = mended.error is None and same(mended.values, wanted.values)
        yield Repair(
            program.name, lines[number].strip(), type(outcome.error).__name__, hint, True, stated is not None, right
        )


def _without(line: str) -> str | None:
    text = line.strip()
    if text.startswith(("T.wait(", "T.signal(")) and text.partition("#")[0].rstrip().endswith(")"):
        return line.replace(text, "pass")
    return _SIGNAL.sub("", line) if _SIGNAL.search(line) and text.startswith("T.copy") else None


def _run(program: Program, lines: list[str], folder: Path) -> Outcome:
    module = _module(lines, folder)
    made = getattr(module, program.make.__name__)
    return Bench(Program(program.kind, program.level, program.origin, made, program.variant, None)).run(None)


def _module(lines: list[str], folder: Path) -> ModuleType:
    path = folder / f"repaired_{next(_numbers)}.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _added(lines: list[str], statement: str, side: str, number: str) -> list[str]:
    """The lines with one more: before or after the statement of a line, or the parallel loop that contains it."""
    line, found = int(number), None
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            together = isinstance(node, ast.For) and "T.Parallel" in ast.unparse(node.iter)
            if found is None or not (isinstance(found, ast.For) and "T.Parallel" in ast.unparse(found.iter)):
                if not isinstance(node, ast.FunctionDef | ast.With | ast.If | ast.For | ast.ClassDef) or together:
                    found = node
    at = found.lineno - 1 if side == "before" else found.end_lineno
    return [*lines[:at], " " * found.col_offset + statement, *lines[at:]]


def main() -> None:
    """Print all outcomes, and the counts."""
    count: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for program in candidates():
            for repair in repairs(program, Path(folder)):
                count.update(found=1, hinted=repair.hinted, right=repair.right)
                mark = "right" if repair.right else "WRONG" if repair.hinted else "no remedy"
                print(f"{mark:9} {repair.program}: {repair.line} ({repair.error}): {repair.hint[:110]}", flush=True)
    print(dict(count))


if __name__ == "__main__":
    main()
