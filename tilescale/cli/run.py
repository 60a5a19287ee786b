# SPDX-License-Identifier: MIT
"""`tilescale run -n 4 script.py ...`: a job of local processes that need neither GPUs nor an installed launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType

import click

from tilescale.cli.names import MachineName
from tilescale.comm.local_job import LocalJob

__all__ = ["run"]

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a script on several local ranks.",
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of processes to start.")
@click.option(
    "--machine", type=MachineName(), help="Default machine of the ranks: a built-in name or the file of a description."
)
@click.option("--emulate", is_flag=True, help="Run programs on the emulator even where GPUs are present.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.option("--traceback", is_flag=True, help="Show the traceback of every rank, not of the first that fails alone.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int,
    machine: str | None,
    emulate: bool,
    module: bool,
    traceback: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGS on RANKS local processes.

    Every line of output is marked with its rank. The rank that fails first shows its error, the others a line each; its
    exit code is that of this command. Ctrl-C ends all ranks, and so does the end of this command.
    """
    env = dict(os.environ)
    if machine is not None:
        env["TILESCALE_MACHINE"] = machine
    if emulate:
        env["TILESCALE_EMULATE"] = "1"
    if traceback:
        env["TILESCALE_TRACEBACK"] = "full"
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # ranks may say what this terminal's encoding lacks
    command = [sys.executable, *(["-m"] if module else []), script, *args]
    job = LocalJob(command, ranks, env, _Printer(ranks).show)
    try:
        job.run()
    except KeyboardInterrupt:
        click.echo("tilescale run: interrupted, all ranks ended", err=True)
        sys.exit(130)
    if job.error is not None:
        with contextlib.suppress(OSError):
            click.echo(click.style("tilescale run: ", fg="red", bold=True) + str(job.error), err=True)
    _drop_unwritten_output()
    sys.exit(job.exit_code)


def _drop_unwritten_output() -> None:
    """What the output's reader, or its disk, did not take must not be tried again when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Printer:
    """Whole lines, marked with their rank; click drops the colours where the output is no terminal."""

    def __init__(self, ranks: int):
        width = len(str(ranks - 1))
        self._marks = [click.style(f"[{r:>{width}}]", fg=_COLOURS[r % len(_COLOURS)]) for r in range(ranks)]
        self._lock = threading.Lock()

    def show(self, rank: int, line: str, from_stderr: bool) -> None:
        with self._lock:
            click.echo(f"{self._marks[rank]} {line}", err=from_stderr)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
