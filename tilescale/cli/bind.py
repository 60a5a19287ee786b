# SPDX-License-Identifier: MIT
"""`tilescale bind python script.py ...`: become a program that runs where its rank should."""

from __future__ import annotations

import os

import click

from tilescale.comm.binding import binding_of


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a program with the CPU cores and adapters next to its rank's GPU.",
)
@click.option("--show", is_flag=True, help="Say what the rank is bound to, and what that sets for the libraries.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bind(show: bool, program: str, args: tuple[str, ...]) -> None:
    """Become PROGRAM with its ARGS, for a rank that a launcher has started: on the CPU cores next to the rank's GPU,
    with NCCL, NVSHMEM and UCX on the adapters next to it, and with their sockets on the network that leads to rank 0.
    Local rank 0 says which of the node's adapters they take.

    The scheduler's allocation is respected: the cores are a subset of those that this process may use. Variables of the
    libraries that the user has set stay.
    """
    found = binding_of(os.environ)
    added = found.variables(os.environ)
    if found.cores:
        os.sched_setaffinity(0, found.cores)
    if show or (found.local_rank == 0 and found.adapters.ports):
        variables = " ".join(f"{key}={text}" for key, text in added.items())
        click.echo(f"tilescale bind: {found}" + (f"; {variables}" if variables else ""), err=True)
    try:
        os.execvpe(program, [program, *args], os.environ | added)
    except OSError as error:
        raise click.ClickException(f"cannot run {program}: {error.strerror}") from error
