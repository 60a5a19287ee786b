# SPDX-License-Identifier: MIT
"""`tilescale bench`: collectives and operators compared with NCCL and PyTorch, on the machine at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tilescale.cli import ranks as job
from tilescale.cli.machine import console
from tilescale.cli.names import machine_option, reported

EXAMPLES = """
\b
Examples:
  tilescale bench                             collectives and operators, on all GPUs of this computer
  tilescale bench collectives -n 2            collectives alone, on two
  tilescale bench operators --rounds 20       GEMMs with a gather, a scatter or a sum
  tilescale bench collectives --chart us.svg  a line for each system over the bytes
  tilescale bench --json rows.json            all rows with their spread
  tilescale bench --quick                     few sizes: to see that it works

\b
Contenders are interleaved, since a GPU under load lowers its clocks; times are medians over the rounds
of the slowest rank, ratios those of the same rounds to the first column.

\b
Without GPUs times are simulated, for the machine that --machine names; NCCL is then its model:
  tilescale bench collectives --machine h200-sxm-8 --units 8 --chart us.svg
"""


@click.command(epilog=EXAMPLES, short_help="Race collectives and operators against NCCL and cuBLAS.")
@job.option("all GPUs of this computer")
@machine_option
@click.option("--units", type=click.IntRange(min=2), help="Units that are simulated.  [default: all of the machine]")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Groups of calls of each.")
@click.option("--quick", is_flag=True, help="Few sizes.")
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), help="Draw into this .svg, .png or .pdf.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write all rows into this file.")
@click.argument("works", nargs=-1, type=click.Choice(["collectives", "operators"]))
def bench(
    ranks: int | None,
    machine: str | None,
    units: int | None,
    rounds: int,
    quick: bool,
    chart: Path | None,
    out: Path | None,
    works: tuple[str, ...],
) -> None:
    """Race collectives and operators against NCCL, cuBLAS and PyTorch's symmetric memory.

    WORKS are collectives, operators, or by default both.
    """
    if chart is not None and chart.suffix not in (".svg", ".png", ".pdf"):
        raise click.BadParameter(f"{chart} ends in neither .svg, .png nor .pdf", param_hint="--chart")
    job.join(ranks)
    with reported():
        from tilescale.hda.current import as_machine
        from tilescale.tuning.bench import bench as race
        from tilescale.tuning.files import save
        from tilescale.tuning.places import here
        from tilescale.tuning.progress import steps
        from tilescale.tuning.race import text_of
        from tilescale.tuning.table import tables

        place, chosen = here(as_machine(machine), units), works or ("collectives", "operators")
        if place.units < 2:
            raise click.UsageError("a collective needs at least two units or GPUs")
        with steps(place.team.rank) as shown:
            found = race(place, shown, chosen, quick=quick, rounds=rounds)
        if place.team.rank:
            return
        console().print(f"{place.units} x {place.name}\n")
        console().print(tables(found["rows"]))
        if out is not None:
            save(out, text_of(found))
        if chart is not None:
            _draw(found, chart, "operators" in chosen)


def _draw(found: dict[str, Any], path: Path, as_bars: bool) -> None:
    """Curves over bytes if all works are collectives, else bars."""
    from tilescale.errors import DependencyError

    try:
        from tilescale.tuning import chart, curves
    except ImportError:
        raise DependencyError("a chart needs matplotlib", hint="pip install matplotlib") from None
    (chart if as_bars else curves).draw(found, path)
    click.echo(f"drawn into {path}")
