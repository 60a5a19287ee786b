# SPDX-License-Identifier: MIT
"""Simulated times compared with measurements of a server of GPUs: `python benchmarks/beside.py FOLDER`; needs no GPU.

Reads `wires.json`, `collectives.json` and `operators.json` of a folder that `node.sh` has filled, simulates the same
programs on the machine's description, and writes `predictions.json` to the same folder, in the order of the rows. The
table shows the errors of simulated times, weighted by the measured ones, and names the largest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parent), str(SCRIPT.parent / "works")]

import tilescale  # noqa: E402 - found through the path above
from tilescale.hda import Machine  # noqa: E402
from tilescale.tuning import programs  # noqa: E402

Row = dict[str, Any]

OPERATORS: dict[str, Callable[[Machine, int, tuple[int, int, int]], Any]] = {
    "ag_gemm": programs.gather_and_gemm,
    "gemm_rs": programs.gemm_and_scatter,
    "gemm_ar": programs.gemm_and_sum,
}
"""Return the sequential program of an operator, which the compiler overlaps."""

FEWEST_ROWS = 1024
"""GEMMs of fewer rows use the vendor's library, which is not simulated."""

WIRES = {"tilescale, copy engine": "copy_engine", "tilescale, stores": "lsu"}
WORST = 5


def simulated(program: Any, machine: Machine) -> float:
    return tilescale.emulate(program, machine=machine, data=False, progress=False).time_us


def predictions(folder: Path, machine: Machine) -> Iterator[tuple[Row, Callable[[], float]]]:
    """Measured rows of TileScale that can be simulated, and their programs."""
    for row in rows(folder / "wires.json"):
        if row["contender"] in WIRES:
            yield row, lambda row=row: _wire(row, machine)
    for row in rows(folder / "collectives.json"):
        if row["contender"] == "tilescale" and row["mode"] == "graph":
            made = programs.collective(machine, row["gpus"], row["work"], row["shape"][0], None)
            yield row, lambda made=made: simulated(made, machine)
    for row in rows(folder / "operators.json"):
        is_gemm = row["work"] in OPERATORS and row["dtype"] == "bfloat16" and row["shape"][0] >= FEWEST_ROWS
        if row["contender"] == "tilescale" and is_gemm:
            yield row, lambda row=row: _operator(row, machine)


def rows(path: Path) -> list[Row]:
    """Rows of a results file that have a time; none if there is no such file."""
    made = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [row for row in made if row["us"] is not None]


def _wire(row: Row, machine: Machine) -> float:
    from patterns import program

    return simulated(program(row["work"], row["gpus"], row["shape"][0], WIRES[row["contender"]]), machine)


def _operator(row: Row, machine: Machine) -> float:
    made = OPERATORS[row["work"]](machine, row["gpus"], tuple(row["shape"]))
    return simulated(tilescale.compile(made, machine=machine, schedule="overlap").ir, machine)


def table(made: list[Row]) -> Table:
    """Return a row for each work: the number of times, and their errors."""
    shown = Table("work", "times", "mean error", "worst")
    for work in dict.fromkeys(row["work"] for row in made):
        mine = [row for row in made if row["work"] == work]
        worst = max(mine, key=lambda row: abs(row["error"]))
        shown.add_row(work, str(len(mine)), f"{mean_error(mine):.1%}", f"{worst['error']:+.0%} at {worst['shape']}")
    shown.add_row("all", str(len(made)), f"{mean_error(made):.1%}", "")
    return shown


def mean_error(made: list[Row]) -> float:
    """Mean error, weighted by the measured times."""
    return sum(abs(row["simulated_us"] - row["us"]) for row in made) / sum(row["us"] for row in made)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--machine", default=None, help="Name or file of the description.  [default: this computer's]")
@click.option("--limit", default=600.0, show_default=True, help="Seconds after which no further one is simulated.")
def main(folder: Path, machine: str | None, limit: float) -> None:
    described = Machine.load(machine) if machine else tilescale.current_machine()
    console, begin, made = Console(), time.monotonic(), list[Row]()
    every = list(predictions(folder, described))
    for row, run in track(every, "simulating", console=Console(stderr=True), transient=True):
        if time.monotonic() - begin < limit:
            us = run()
            made.append({**row, "simulated_us": round(us, 2), "error": round(us / row["us"] - 1, 3)})
    if not made:
        raise click.UsageError(f"nothing in {folder} can be simulated")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in made)
    text = f'{{\n "machine": "{described.name}",\n "rows": [\n{lines}\n ]\n}}\n'
    (folder / "predictions.json").write_text(text, encoding="utf-8")
    console.print(table(made))
    if len(made) < len(every):
        console.print(f"{len(every) - len(made)} more were not simulated in {limit:g} s")
    for row in sorted(made, key=lambda row: -abs(row["error"]))[:WORST]:
        shape = "x".join(map(str, row["shape"]))
        console.print(f"{row['work']} {shape} {row['mode']}: {row['us']} us, simulated {row['simulated_us']}")


if __name__ == "__main__":
    main()
