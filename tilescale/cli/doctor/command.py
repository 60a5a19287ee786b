# SPDX-License-Identifier: MIT
"""`tilescale doctor [--job] [--json]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import click

from tilescale.cli.doctor.finding import Finding
from tilescale.errors import TileScaleError

_MARKS = {True: ("yes", "green"), False: ("NO ", "red"), None: (" - ", "yellow")}


@click.command(short_help="Say what this machine, or this job, can do, and why not.")
@click.option("--job", is_flag=True, help="Check the job that this process is a rank of; start it as you start yours.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(job: bool, as_json: bool) -> None:
    """Say what this machine can do, and why not.

    With --job, all ranks of a job check together which peers they reach: `tilescale run -n 4 -m tilescale.cli doctor
    --job`, or the same behind torchrun, mpirun or srun. The exit code is 1 if something does not work.
    """
    found = list(_printed(_of_job() if job else _of_host(), as_json))
    sys.exit(int(any(finding.works is False for finding in found)))


def _of_host() -> Iterator[Finding]:
    from tilescale.cli.doctor.host import findings

    return findings()


def _of_job() -> Iterator[Finding]:
    """The findings at rank 0; the others take part and print nothing."""
    from tilescale.cli.doctor.job import findings
    from tilescale.comm import init

    try:
        world = init()
    except TileScaleError as error:
        yield Finding("joining", False, error.message, error.hint or "")
        return
    for finding in findings(world):
        if world.rank == 0:
            yield finding


def _printed(findings: Iterable[Finding], as_json: bool) -> Iterator[Finding]:
    kept = []
    for finding in findings:
        kept.append(finding)
        if not as_json:
            click.echo(_line(finding))
        yield finding
    if as_json and kept:
        click.echo(json.dumps([asdict(finding) for finding in kept], indent=2))


def _line(finding: Finding) -> str:
    mark, colour = _MARKS[finding.works]
    line = f"{click.style(mark, fg=colour)}  {finding.name:<16}{finding.found}"
    return line + (f"\n     {'':<16}-> {finding.remedy}" if finding.remedy and not finding.works else "")
