# SPDX-License-Identifier: MIT
"""`tilescale machine`: list, show, detect and check machine descriptions."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from tilescale.cli.names import CommandFailure, MachineName, reported
from tilescale.hda import Machine
from tilescale.hda.draw import terminal

EXAMPLES = """
\b
Examples:
  tilescale machine list                              what is built in
  tilescale machine show h200-sxm-8                   levels, memory, networks, rates
  tilescale machine show wafer-mesh --svg wafer.svg   the same as a picture
  tilescale machine detect                            the machine you sit at
  tilescale machine check my-chip.yaml                is my description right?

\b
A description of your own extends a built-in one or starts afresh; docs/machines.md
shows how. Pass its path in place of a machine's name:
  tilescale machine show ./my-chip.yaml
"""


@click.group(epilog=EXAMPLES, short_help="Show, list, check and detect descriptions of machines.")
def machine() -> None:
    """Machines that programs are written for, emulated on and run on.

    A machine is a description file: levels of units from threads to servers, the memory each owns, and the networks
    between them. NAME is a built-in machine or the path of a description.
    """


@machine.command("list")
def list_machines() -> None:
    """List the built-in machines."""
    with reported():
        console().print(terminal.listing(Machine.load(name) for name in Machine.names()))


@machine.command()
@click.argument("name", type=MachineName())
@click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Draw it into this file.")
def show(name: str, svg: Path | None) -> None:
    """Show a machine: its levels, memory layers, networks and rates.

    \b
    Examples:
      tilescale machine show h200-sxm-8x4
      tilescale machine show gb200-nvl72 --svg rack.svg
    """
    with reported():
        found = Machine.load(name)
    _show(found, svg)


@machine.command()
@click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Draw it into this file.")
def detect(svg: Path | None) -> None:
    """Show the machine this command runs on.

    GPUs are counted through NVML with their memory and links; without any, sockets, cores and memory are. What cannot
    be counted comes from the built-in description that fits best.
    """
    with reported():
        found = Machine.detect()
    _show(found, svg)


@machine.command(short_help="Say what is wrong with a description FILE, line by line.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check(file: Path) -> None:
    """Check a description FILE and say what is wrong with it, line by line.

    Exit code 0 if it is right, 2 if not.
    """
    with reported():
        found = Machine.load(file)
    levels, layers = ", ".join(found.level_names), ", ".join(layer.name for layer in found.memory)
    networks = ", ".join(net.name for net in found.networks) or "none"
    click.echo(f"{file} is valid: {found.title}\n  levels    {levels}\n  memory    {layers}\n  networks  {networks}")


def _show(found: Machine, svg: Path | None) -> None:
    if svg is None:
        console().print(terminal.picture(found))
        return
    from tilescale.hda.draw.svg import picture

    if svg.suffix != ".svg":
        raise CommandFailure(f"a machine is drawn as SVG: name the file {svg.with_suffix('.svg')}")
    try:
        svg.write_text(picture(found), encoding="utf-8")
    except OSError as error:
        raise CommandFailure(f"{svg} cannot be written: {error.strerror}") from None
    click.echo(f"{found.name} drawn into {svg}")


def console() -> Console:
    """Standard output."""
    # Piped into a file or a pager, lines are as long as they need to be.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)
