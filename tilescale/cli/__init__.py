# SPDX-License-Identifier: MIT
"""The command line: `tilescale run`, `machine`, `new`, `doctor`, `bind`, `calibrate`, `tune`, `bench`, `completion`."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click

from tilescale import __version__
from tilescale.cli.bench import bench
from tilescale.cli.bind import bind
from tilescale.cli.calibrate import calibrate
from tilescale.cli.completion import completion
from tilescale.cli.doctor.command import doctor
from tilescale.cli.machine import machine
from tilescale.cli.new import new
from tilescale.cli.run import run
from tilescale.cli.tune import tune

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of an output that takes no more."""


class Commands(click.Group):
    """Commands whose output may be a file on a full disk: an error of one line."""

    def main(self, *args: Any, **given: Any) -> Any:
        """As click's."""
        try:
            return super().main(*args, **given)
        except OSError as error:
            if error.errno not in FULL or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left at its end
            click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tilescale")
def main() -> None:
    """Tile programs for a whole machine.

    \b
    tilescale run -n 4 script.py          start a script on 4 ranks
    tilescale machine list                machines that are described
    tilescale machine show h200-sxm-8     levels, memory and networks of one
    tilescale new halo                    a program to start from, with its test
    tilescale doctor                      what this machine can do, and why not
    tilescale bind python script.py       a rank on the cores next to its GPU
    tilescale calibrate                   measure the GPUs of this computer
    tilescale tune gemm.py 4096 4096 4096 the fastest configuration of a program
    tilescale bench collectives           compared with NCCL and PyTorch, as a table and a chart
    tilescale completion bash             what a shell reads to complete commands and machines
    """


main.add_command(bench)
main.add_command(bind)
main.add_command(calibrate)
main.add_command(completion)
main.add_command(doctor)
main.add_command(machine)
main.add_command(new)
main.add_command(run)
main.add_command(tune)
