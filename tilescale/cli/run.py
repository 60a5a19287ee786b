# SPDX-License-Identifier: MIT
"""`tilescale run -n 4 script.py ...`: a job of processes, on one node or several, that needs no installed launcher."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from types import FrameType

import click

from tilescale.cli.names import MachineName
from tilescale.comm.local_job import LocalJob, limit_behind
from tilescale.comm.nodes import PORT, LauncherRendezvous, join, rendezvous_of
from tilescale.comm.rank_process import NodePlacement
from tilescale.comm.trust.key import KEY, new_key
from tilescale.errors import TileScaleError
from tilescale.hda import Machine
from tilescale.settings import Settings

_BIND = ("-m", "tilescale.cli", "bind")
_DOCTOR = ("-m", "tilescale.cli", "doctor", "--job")
_DOCTOR_S = 60  # longest wait of its ranks for each other

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a script on several ranks, of this node or of several.",
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of processes to start here.")
@click.option("--nnodes", type=click.IntRange(min=1), default=1, help="Number of nodes; run this command on each.")
@click.option("--node-rank", type=click.IntRange(min=0), help="Number of this node, from 0 on.")
@click.option("--rdzv", metavar="HOST[:PORT]", help=f"Where node 0 waits for the others.  [default port: {PORT}]")
@click.option(
    "--machine", type=MachineName(), help="Default machine of the ranks: a built-in name or the file of a description."
)
@click.option("--emulate", is_flag=True, help="Run programs on the emulator even where GPUs are present.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.option("--traceback", is_flag=True, help="Show the traceback of every rank, not of the first that fails alone.")
@click.option("--bind", is_flag=True, help="Keep each rank on the CPU cores that are next to its GPU.")
@click.option("--keep-going", is_flag=True, help="Leave the other ranks alone where one fails: tilescale.shrink().")
@click.option("--doctor", is_flag=True, help="After a failure, say what this job can do and why not.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int, nnodes: int, node_rank: int | None, rdzv: str | None, machine: str | None, emulate: bool, module: bool,
    traceback: bool, bind: bool, keep_going: bool, doctor: bool, script: str, args: tuple[str, ...],
) -> None:  # fmt: skip
    """Run SCRIPT with its ARGS on RANKS processes of this node, or of each of several nodes.

    Every line of output is marked with its rank. The rank that fails first shows its error, the others a line each; its
    exit code is that of this command, on every node. Ctrl-C ends all ranks, and so does the end of this command.

    With several nodes, run the same command on each, with its own --node-rank and the same key of the job: in
    TILESCALE_JOB_KEY_FILE, a file that (umask 077; openssl rand -hex 32 > job.key) makes.
    """
    if keep_going and nnodes > 1:
        raise click.BadParameter("it is for jobs of one node", param_hint="--keep-going")
    if not module and not os.path.exists(script):
        raise click.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    env = dict(os.environ)
    if machine is not None:
        _check_room(machine, ranks * nnodes)
        env["TILESCALE_MACHINE"] = machine
    if emulate:
        env["TILESCALE_EMULATE"] = "1"
    if traceback:
        env["TILESCALE_TRACEBACK"] = "full"
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if closed by the parent process
            # output of ranks may contain characters outside of this terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    bound = [sys.executable, *_BIND] if bind else []
    try:
        rendezvous = None if nnodes == 1 else rendezvous_of(nnodes, node_rank, rdzv, env)
        words = [*bound, sys.executable, *(["-m"] if module else []), script, *args]
        code = _run(words, ranks, env, rendezvous, keep_going)
        if code and doctor:
            click.echo(click.style("tilescale run: ", fg="red", bold=True) + "tilescale doctor --job says:", err=True)
            _run([sys.executable, *_DOCTOR], ranks, env | {"TILESCALE_TIMEOUT_S": str(_DOCTOR_S)}, rendezvous)
    except TileScaleError as error:
        raise click.ClickException(str(error)) from error
    except (OSError, RuntimeError, MemoryError) as error:
        said = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        if not (limit := limit_behind(said)) and not isinstance(error, OSError):
            raise
        raise click.ClickException(f"the ranks cannot be started, {said}{limit}") from error
    except KeyboardInterrupt:
        click.echo("tilescale run: interrupted, all ranks ended", err=True)
        sys.exit(130)
    _drop_unwritten_output()
    sys.exit(code)


def _check_room(machine: str, ranks: int) -> None:
    """Raises UsageError of the command where a machine has fewer devices than the job ranks."""
    described = Machine.load(machine)
    level = described.tensor_level.name
    there = described.count(level)
    if ranks > there:
        raise click.BadParameter(
            f"{described.name} has {there} units of level {level!r}, and the job {ranks} ranks: start at most {there}, "
            "or name a larger machine",
            param_hint="--machine",
        )


def _run(
    command: list[str], ranks: int, env: dict[str, str], rendezvous: LauncherRendezvous | None, keep_going: bool = False
) -> int:
    """The exit code of a job. Raises LaunchError if the nodes do not find each other."""
    if rendezvous is None:
        place, others, env = NodePlacement.on_one_node(ranks), None, env | {KEY: new_key()}
    else:
        others = join(rendezvous, ranks, Settings.from_env(env).timeout_s)
        place = NodePlacement(
            ranks, others.first, others.size, rendezvous.node, rendezvous.host, others.ports, others.reserved
        )  # fmt: skip
    job = LocalJob(command, place, env, _Printer(place.size).show, others, keep_going)
    job.run()
    if job.error is not None:
        with contextlib.suppress(OSError):
            click.echo(click.style("tilescale run: ", fg="red", bold=True) + str(job.error), err=True)
    return job.exit_code


def _drop_unwritten_output() -> None:
    """Drop output that the reader or the disk refused, so that Python does not write it again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Printer:
    """Print whole lines, marked with their rank; click drops the colours where the output is not a terminal."""

    def __init__(self, ranks: int):
        width = len(str(ranks - 1))
        self._marks = [click.style(f"[{r:>{width}}]", fg=_COLOURS[r % len(_COLOURS)]) for r in range(ranks)]
        self._lock = threading.Lock()

    def show(self, rank: int, line: str, from_stderr: bool) -> None:
        with self._lock:
            click.echo(f"{self._marks[rank]} {line}", err=from_stderr)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
