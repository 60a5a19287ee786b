# SPDX-License-Identifier: MIT
"""`tilescale calibrate`: measure the machine at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilescale.cli import ranks as job
from tilescale.cli.machine import console
from tilescale.cli.names import machine_option, reported

if TYPE_CHECKING:
    from tilescale.cost.measured import Measured

EXAMPLES = """
\b
Examples:
  tilescale calibrate                     all GPUs of this computer, in under three minutes
  tilescale calibrate -n 2                two of them
  tilescale calibrate --machine h100-sxm-8
  tilescale calibrate --quick             few sizes: to see that it works
  tilescale calibrate --out data.json     elsewhere, and not in force

\b
From then on choices follow what was measured: of collectives' algorithms at sizes between those
that were, and of the way that copies take. `tilescale.calibrated("h200-sxm-8")` is the machine
with these numbers, to be emulated. All ranks of a job must find the same calibration: run it on
one node, and copy the file to the others.

\b
Without GPUs times are simulated, so they say nothing of this computer and choices ignore them:
  tilescale calibrate --units 2 --quick --machine h200-sxm-8
"""


@click.command(epilog=EXAMPLES)
@job.option("all GPUs of this computer")
@machine_option
@click.option("--units", type=click.IntRange(min=1), help="Units that are simulated.  [default: all of the machine]")
@click.option("--quick", is_flag=True, help="Leave out most sizes.")
@click.option("--limit", default=150.0, show_default=True, help="Seconds after which nothing new is begun.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the file here instead.")
def calibrate(
    ranks: int | None, machine: str | None, units: int | None, quick: bool, limit: float, out: Path | None
) -> None:
    """Measure the machine at hand, and keep it as a dated file.

    Measures links by mechanism and size, flags, launches, GEMMs, collectives by algorithm and size, and GEMMs
    concurrent with copies. Measurements are interleaved and run on all ranks together; medians and spreads are kept.
    """
    job.join(ranks)
    with reported():
        from tilescale.hda.current import as_machine
        from tilescale.tuning.calibrate import calibrate as measure
        from tilescale.tuning.calibrate import keep
        from tilescale.tuning.files import save
        from tilescale.tuning.places import here
        from tilescale.tuning.progress import steps

        place = here(as_machine(machine), units)
        with steps(place.team.rank) as shown:
            found = measure(place, shown, quick=quick, limit_s=limit)
        if place.team.rank:
            return
        if out is not None:
            save(out, found.text)
        path = out or keep(found)
    _show(found)
    click.echo(f"\nkept in {path}")


def _show(found: Measured) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("", "what", "at"):
        table.add_column(heading)
    table.add_column("median", justify="right")
    table.add_column("spread", justify="right")
    for row in _rows(found):
        table.add_row(*row)
    how = "simulated" if found.simulated else found.gpu
    console().print(f"{found.machine}, {found.units} units, {how}\n")
    console().print(table)


def _rows(found: Measured) -> Iterator[tuple[str, ...]]:
    from tilescale.hda.units import format_bytes

    for wire in found.wires:
        by = "one program" if wire.programs == 1 else f"{wire.programs} programs" if wire.programs else ""
        at = ", ".join(part for part in (format_bytes(wire.nbytes) if wire.nbytes else "", by) if part)
        yield "wire", f"{wire.mechanism} {wire.operation}", at, f"{wire.gb_s:.4g} GB/s", _spread(wire.spread)
    for flag in found.flags:
        yield "flag", "one way", format_bytes(flag.nbytes), f"{flag.us:.4g} us", _spread(flag.spread)
    for launch in found.launches:
        yield "launch", "nothing", launch.mode, f"{launch.us:.4g} us", _spread(launch.spread)
    for product in found.products:
        at = " x ".join(map(str, product.shape))
        yield "GEMM", f"{product.by} {product.dtype}", at, f"{product.us:.4g} us", _spread(product.spread)
    for made in found.collectives:
        what = f"{made.operation} {made.algorithm}"
        yield "collective", what, format_bytes(made.nbytes), f"{made.us:.4g} us", _spread(made.spread)
    for point in found.contention:
        at = " x ".join(map(str, point.shape))
        yield "contention", f"GEMM with {point.mechanism}", at, f"{point.ratio:.3f} x", _spread(point.spread)


def _spread(spread: tuple[float, float] | None) -> str:
    return "" if spread is None or spread[0] == spread[1] else f"{spread[0]:.4g} to {spread[1]:.4g}"
