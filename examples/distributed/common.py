# SPDX-License-Identifier: MIT
"""Common parts of the examples: options, runs on every device, comparison with a float64 reference, a table per device.

Started as `python 01_neighbour_shift.py`, one process holds the tensors of all devices and emulates them together.
Started by a launcher, each rank is one device: it passes its own tensors and looks at its own results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import tilescale
from tilescale.errors import TileScaleError
from tilescale.hda.units import format_bytes


def options(*, size: int, devices: int = 4, machine: str | None = None) -> Callable[[Callable], click.Command]:
    """Return a click command with --devices, --machine, --size, --seed and --timeline; `machine` has the program's
    levels.
    """
    own = machine

    def decorate(function: Callable) -> click.Command:
        def main(machine: str | None, timeline: Path | None = None, **given: Any) -> None:
            ranks = tilescale.init().size
            given["devices"] = given["devices"] or (ranks if ranks > 1 else devices)
            with tilescale.use_machine(machine or own or tilescale.current_machine()):
                function(**given)

        what = f"What to emulate: a name or a file.  [default: {own or 'h200-sxm-8'}]"
        text = f"Devices to launch on.  [default: the ranks of the job, {devices} without one]"
        count, extent = click.IntRange(min=1), "Extent of the tensors."
        file, drawn = click.Path(dir_okay=False, path_type=Path), "Draw it: .html, .svg, .png or .pdf; or .json."
        command = click.command(cls=_Command, help=function.__doc__)(main)
        command = click.option("--timeline", type=file, help=drawn)(command)
        command = click.option("--seed", default=0, show_default=True, help="Seed of the random inputs.")(command)
        command = click.option("--size", type=count, default=size, show_default=True, help=extent)(command)
        command = click.option("--machine", help=what)(command)
        return click.option("--devices", type=count, help=text)(command)

    return decorate


class _Command(click.Command):
    """Command that shows a mistake without its traceback. In a job it is raised, to notify the other ranks."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            return super().main(*args, standalone_mode=standalone_mode, **extra)
        except TileScaleError as error:
            if not standalone_mode or tilescale.init().size > 1:
                raise
            sys.exit(f"Error: {error}")


def divided(size: int, parts: int) -> int:
    """The largest multiple of `parts` up to `size`."""
    if size < parts:
        raise click.UsageError(f"{size} elements do not make {parts} shares: give --size {parts} or more")
    return size - size % parts


def whole(what: str, extent: int, part: int) -> None:
    """Check that an extent of a program has no partial part, for which it has no code. Raises ValueError."""
    if extent % part:
        above = -(-extent // part) * part
        raise ValueError(f"{what}={extent} is not made of whole parts of {part}; {above} would be")


def grid_of(tiles: int) -> int:
    """Number of blocks of a persistent grid on the current machine: two on each SM, at most one for each tile."""
    machine = tilescale.current_machine()
    return min(tiles, 2 * machine.count(machine.program_level.name, machine.tensor_level.name))


def run(program: Any, args: Sequence[Sequence[Any]]) -> None:
    """Run a program on all devices with `args[r]`, the tensors of device r, and show a summary of each device."""
    world = tilescale.init()
    if world.size == 1:
        report = tilescale.emulate(program, args)
    else:
        kernel = tilescale.compile(program)
        mine = [tensor.to(kernel.device) for tensor in args[world.rank]]
        kernel(*mine)
        for tensor, result in zip(args[world.rank], mine, strict=True):
            tensor.copy_(result)
        report = kernel.report
    if report is not None:
        show(report)


def rounding(terms: int, magnitudes: torch.Tensor) -> torch.Tensor:
    """Error bound of float32 sums of `terms` numbers, from the sums of their magnitudes.

    Each addition loses up to 2**-24; many such errors grow with the root of their number (Higham and Mary, 2019).
    """
    return min(terms, 4 * terms**0.5) * 2.0**-24 * magnitudes


def compare(what: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], bound: Any = None) -> None:
    """Compare the results of all devices (of this rank's, in a job) with float64 references, element by element.

    `bound` is the allowed error of each element of each device; None allows none. Raises ValueError for a wrong one.
    """
    world = tilescale.init()
    devices = list(range(len(got))) if world.size == 1 else [world.rank]
    errors = [(got[d].double() - want[d].double()).abs() for d in devices]
    allowed = [torch.zeros_like(e) if bound is None else bound[d] for d, e in zip(devices, errors, strict=True)]
    wrong = [~(e <= a) for e, a in zip(errors, allowed, strict=True)]  # NaN is not within a bound either
    largest, most = max(float(e.max()) for e in errors), max(float(a.max()) for a in allowed)
    named = ", ".join(map(str, devices)) if len(devices) <= 8 else f"{devices[0]} to {devices[-1]}"
    text = f"{what}, device {named}: largest error {largest:.1e}, rounding allows {most:.1e}"
    if any(bool(w.any()) for w in wrong):
        raise ValueError(f"{text}; wrong elements on each device: {[int(w.sum()) for w in wrong]}")
    print(text)


def show(report: tilescale.Report) -> None:
    """Print a table with the work of each device and the simulated time."""
    units = (report.machine.tensor_level.name, f"{report.machine.program_level.name}s")
    columns = (*units, "sent", "received", "signals", "collective bytes", "collectives")
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, did in enumerate(report.activity):
        names = "\n".join(f"{count} {name}" for name, count in did.collectives.items())
        moved = (format_bytes(size) for size in (did.sent, did.received))
        table.add_row(str(number), str(did.programs), *moved, str(did.signals), format_bytes(did.contributed), names)
    Console().print(table)
    print(f"emulated {report.machine.name} in {report.wall_s:.2f} s; there it takes {report.time_us:.1f} us")
    draw(report)


def draw(report: tilescale.Report) -> None:
    """Draw the timeline where `--timeline` asks for it; programs after the first get a number."""
    context = click.get_current_context(silent=True)
    if context is None or (path := context.params.get("timeline")) is None:
        return
    number = context.meta["timelines"] = context.meta.get("timelines", 0) + 1
    target = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
    (report.trace if target.suffix == ".json" else report.plot)(target)
    print(f"its timeline: {target}")
