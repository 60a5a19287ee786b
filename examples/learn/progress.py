# SPDX-License-Identifier: MIT
"""Check all exercises and show how far you are.

`python progress.py` takes a few seconds. Its exit status says whether all are solved.
"""

from __future__ import annotations

import sys

import click
import judge
import learn
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

COLOURS = {judge.SOLVED: "green", judge.UNWRITTEN: "dim", judge.WRONG: "red"}


@click.command(help="Check all exercises and show how far you are.")
@click.option("--solutions", is_flag=True, help="Check the solutions instead of what you wrote.")
def main(solutions: bool) -> None:
    table = Table("exercise", "what it is about", "state", box=SIMPLE_HEAD)
    states = []
    for path in learn.ladder():
        module = learn.load(path)
        state = module.exercise.check(solution=solutions).state
        states.append(state)
        title = module.__doc__.splitlines()[0].rstrip(".").partition(":")[0]
        table.add_row(path.name, title, f"[{COLOURS[state]}]{state}")
    Console().print(table)
    solved = states.count(judge.SOLVED)
    click.echo(f"{solved} of {len(states)} solved")
    sys.exit(solved < len(states))


if __name__ == "__main__":
    main()
