# SPDX-License-Identifier: MIT
"""The steps of `tilescale new --tutorial`: run the new program, break it, change it, start it as a job."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

WAIT = '                    T.wait(arrived[row], ">=", 1)\n'
"""The line of the template without which the program has a race."""


@dataclass(frozen=True)
class TutorialStep:
    """A step of the tutorial.

    Attributes:
        title: of the step, an imperative.
        about: what to look at.
        edits: replacements in the files as they were made.
        words: of the command, with NAME for the program; empty for `python NAME.py`.
        fails: whether the command ends with an error.
    """

    title: str
    about: str
    edits: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    fails: bool = False

    def edited(self, text: str) -> str:
        """The text of a file in this step."""
        for old, new in self.edits:
            text = text.replace(old, new)
        return text


STEPS = (
    TutorialStep(
        "Run the program",
        "The emulator runs four devices on this CPU. Its report shows what each sent, the simulated time on H200,\n"
        "and the critical path by lines of the program.",
    ),
    TutorialStep(
        "Remove the wait",
        "A device now reads its inbox before the neighbour's row has arrived. On GPUs the result is sometimes wrong;\n"
        "the emulator reports an error with the line of the read and the line that is missing.",
        edits=((WAIT, ""),),
        fails=True,
    ),
    TutorialStep(
        "Make it your kernel",
        "The wait is back, and the kernel computes a difference. From here on change what it computes and what its\n"
        "check expects.",
        edits=(
            ("mine[0, j] + theirs[0, j]", "mine[0, j] - theirs[0, j]"),
            ("tensors[device] + tensors[device - 1]", "tensors[device] - tensors[device - 1]"),
            ("which adds it to its own", "which subtracts it from its own"),
            ("Y is the sum of both", "Y is the difference of both"),
            ("each_device_adds_what", "each_device_subtracts_what"),
        ),
    ),
    TutorialStep(
        "Start it as a job",
        "The same file with one process for each rank: on GPUs where this machine has them, otherwise emulated.",
        words=("run", "-n", "2"),
    ),
)  # fmt: skip


def walk(program: Path, test: Path) -> None:
    """Go through the steps with the files that `tilescale new` made. A terminal's user begins each step by a key.

    Raises:
        ClickException: a step did not end as it should.
    """
    made = {path: path.read_text(encoding="utf-8") for path in (program, test)}
    for number, step in enumerate(STEPS, 1):
        click.secho(f"\nStep {number} of {len(STEPS)}: {step.title}", bold=True)
        click.echo(step.about)
        if step.words:
            shown, words = f"tilescale {' '.join(step.words)}", ("-m", "tilescale.cli", *step.words)
        else:
            shown, words = "python", ()
            for path, text in made.items():
                _rewrite(path, step.edited(text))
        click.secho(f"$ {shown} {program.name}", fg="cyan")
        click.pause()
        if (execute([*words, program.name], program.parent) != 0) != step.fails:
            raise click.ClickException(
                f"`{shown} {program.name}` should have {'failed' if step.fails else 'succeeded'}"
            )
    click.secho(f"\nDone. {program} and {test} are yours.", bold=True)


def execute(words: Sequence[str], folder: Path) -> int:
    """Run Python with `words` in a folder; its exit code."""
    return subprocess.run([sys.executable, *words], cwd=folder).returncode


def _rewrite(path: Path, text: str) -> None:
    before = path.read_text(encoding="utf-8")
    for line in _changes(before.splitlines(), text.splitlines()):
        click.secho(f"{path.name}  {line}", fg="green" if line[0] == "+" else "red")
    path.write_text(text, encoding="utf-8")


def _changes(before: Sequence[str], after: Sequence[str]) -> Iterable[str]:
    return (line for line in difflib.ndiff(before, after) if line[0] in "+-")
