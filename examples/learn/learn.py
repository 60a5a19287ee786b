# SPDX-License-Identifier: MIT
"""Common parts of the exercises: the placeholder, and the command of every exercise.

cases.py has inputs and results, judge.py runs a program, compare.py puts wrong values into words.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import judge
import torch
from cases import Case, blank, integers, reals

import tilescale
from tilescale.errors import Location, TileScaleError

__all__ = ["Case", "Exercise", "blank", "by_hand", "integers", "ladder", "load", "reals", "todo"]

FOLDER = Path(__file__).parent
DEVICES = {"h200-sxm-8": (2, 3, 4, 8, 1), "gb200-nvl72": (16,)}
"""Machine -> the numbers of devices to run on; two come first, as their errors are the shortest."""


def todo(what: str) -> None:
    """Placeholder: replace this line by the statements that it asks for.

    Raises:
        judge.NotWrittenError: always.
    """
    place = sys._getframe(1)
    raise judge.NotWrittenError(what, where=Location(place.f_code.co_filename, place.f_lineno))


def by_hand(report: tilescale.Report, size: int) -> str | None:
    """Return a complaint if a collective between devices did the work."""
    used = {name for activity in report.activity if activity.contributed for name in activity.collectives}
    if not used:
        return None
    return (
        f"The results are right, and {' and '.join(sorted(used))} made them. In a real program that is the way; this "
        "exercise is about what happens inside: copies, signals and waits."
    )


@dataclass(frozen=True)
class Exercise:
    """A program to write, and its checks.

    Attributes:
        file: path of the exercise. Its docstring is the statement, and its solution has the same name in `solutions/`.
        program: written by the learner: from a size to a traced program for that number of devices.
        case: a launch of that size, made from random numbers.
        advice: explanation of an error in this exercise, by its name ("RaceError") or by that and the tensor that its
            message names first ("RaceError of inbox"); "wrong values" and "too slow" say what to look at.
        demand: what else a report has to show: from the report and the size to a complaint, or None.
        timed: the size, on the first machine, at which it must not take much longer than the solution.
        slack: how much longer than the solution it may take there; the times are exact.
        sizes: which sizes run on which machine.
        unit: what a size counts.
    """

    file: str
    program: Callable[[int], Any]
    case: Callable[[int, torch.Generator], Case]
    advice: Mapping[str, str] = field(default_factory=dict)
    demand: Callable[[tilescale.Report, int], str | None] = lambda report, size: None
    timed: int | None = None
    slack: float = 1.06
    sizes: Mapping[str, Sequence[int]] = field(default_factory=lambda: DEVICES)
    unit: str = "devices"

    @property
    def name(self) -> str:
        """Number and subject, from the name of the file."""
        return Path(self.file).stem.replace("_", " ")

    @property
    def statement(self) -> str:
        """Statement of the exercise, with hints."""
        return ast.get_docstring(ast.parse(Path(self.file).read_text(encoding="utf-8"))) or ""

    @property
    def solution(self) -> Path:
        """File of the solution."""
        return Path(self.file).parent / "solutions" / Path(self.file).name

    @property
    def right(self) -> Callable[[int], Any]:
        """Program of the solution."""
        return load(self.solution).program

    def check(self, *, solution: bool = False) -> judge.Verdict:
        """Judge the learner's program, or the solution."""
        return judge.judge(self, self.right if solution else self.program)

    def main(self, words: Sequence[str] | None = None) -> None:
        """Run the command of an exercise: exits with 0 if it is solved. `words`: arguments, instead of those of the
        command line.
        """

        @click.command(help=_as_it_stands(self.statement))
        @click.option("--solution", is_flag=True, help="Check the solution instead of what you wrote.")
        @click.option("--timeline", metavar="FILE", help="Draw a simulated launch of what is right (.png, .svg, .pdf).")
        def command(solution: bool, timeline: str | None) -> None:
            verdict = self.check(solution=solution)
            click.echo(f"{self.name}: {verdict.state}\n\n{verdict.text}")
            if timeline and verdict.state in (judge.SOLVED, judge.LATE):
                _draw(judge.timed(self, self.right if solution else self.program), timeline)
            if verdict.state == judge.SOLVED and not solution:
                click.echo(f"\nCompare it with {_from_here(self.solution)}.{_next(self.file)}")
            sys.exit(verdict.state != judge.SOLVED)

        command(words)


def ladder() -> list[Path]:
    """Files of all exercises, in order."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def load(path: Path) -> ModuleType:
    """Import a file whose name is not an identifier."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _draw(report: tilescale.Report, file: str) -> None:
    try:
        report.plot(file, engines=True)
    except TileScaleError as error:
        raise click.ClickException(str(error)) from None


def _as_it_stands(text: str) -> str:
    """Mark a docstring so that click does not wrap its lines and drawings."""
    return re.sub(r"^", "\b\n", text, count=1).replace("\n\n", "\n\n\b\n")


def _next(file: str) -> str:
    later = [path for path in ladder() if path.name > Path(file).name]
    return f" The next one: python {_from_here(later[0])}" if later else " It was the last one."


def _from_here(path: Path) -> str:
    """Quote a path, relative to the current folder, for the shell."""
    return os.path.relpath(path)
