# SPDX-License-Identifier: MIT
"""Check all exercises and show how far you are.

`python progress.py` takes a few seconds. Its exit status says whether all are solved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import judge
import learn
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

COLOURS = {judge.SOLVED: "green", judge.UNWRITTEN: "dim", judge.WRONG: "red", judge.LATE: "yellow"}


@click.command(help="Check all exercises and show how far you are.")
@click.option("--solutions", is_flag=True, help="Check the solutions instead of what you wrote.")
def main(solutions: bool) -> None:
    table = Table("exercise", "what it is about", "state", box=SIMPLE_HEAD)
    states = []
    for path in learn.ladder():
        states.append(_state(path, solutions))
        title = path.read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
        table.add_row(path.name, title.rstrip(".").partition(":")[0], f"[{COLOURS[states[-1]]}]{states[-1]}")
    Console().print(table)
    solved = states.count(judge.SOLVED)
    click.echo(f"{solved} of {len(states)} solved")
    sys.exit(solved < len(states))


def _state(path: Path, solution: bool) -> str:
    try:
        return learn.load(path).exercise.check(solution=solution).state
    except (Exception, SystemExit):  # noqa: BLE001 - a file that cannot even be loaded
        return judge.WRONG


if __name__ == "__main__":
    main()
