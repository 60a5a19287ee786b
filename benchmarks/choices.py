# SPDX-License-Identifier: MIT
"""Choices of algorithms compared with measurements: `python benchmarks/choices.py`.

Reads the measurements of each algorithm by `benchmarks/collectives.py --algorithms`, on GPUs of one machine. Sizes that
a calibration measures too become points of the measurements shipped for that machine. At all other sizes `select`
chooses: by these points, and by the description alone. The table of docs/predictions.md shows how often the choice is
as fast as the fastest algorithm, and the largest loss.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tilescale.backends.tilelang.lowering.implemented import ON_TENSORS  # noqa: E402 - found through the path above
from tilescale.collectives import TENSORS, AvailableAlgorithms, CollectiveQuery, select  # noqa: E402
from tilescale.collectives.select import seconds  # noqa: E402
from tilescale.cost.choose import first_of_the_fastest  # noqa: E402
from tilescale.cost.measured import DATA, Measured, MeasuredCollective  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.hda.current import use_machine  # noqa: E402
from tilescale.tuning.probes import chosen_from, tensors  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
PAGE = ROOT / "docs" / "predictions.md"
SOURCE = "benchmarks/results/algorithms.json"

REGRET = 0.03
"""Loss, as a share of the fastest algorithm's time, up to which a choice counts as good."""


@dataclass(frozen=True)
class Case:
    """A collective of a number of units and bytes, and the microseconds of each algorithm, preferred ones first."""

    operation: str
    units: int
    nbytes: int
    us: dict[str, float]

    @property
    def wanted(self) -> CollectiveQuery:
        """The call that asks `select` for an algorithm, as of a program of whole tensors."""
        return CollectiveQuery(self.operation, TENSORS, "device", tuple(range(self.units)), (), self.nbytes, "bfloat16")

    def regret(self, chosen: str) -> float:
        """Loss of an algorithm, as a share of the fastest one's time."""
        return self.us[chosen] / min(self.us.values()) - 1


def cases(rows: Iterable[dict[str, Any]]) -> list[Case]:
    """Measurements in graphs, a case for each operation and size."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        if row["mode"] == "graph" and row["us"] is not None and row["work"] != "put":
            name = row["contender"].removeprefix("tilescale ")
            found.setdefault((row["work"], row["gpus"], 2 * row["shape"][0]), {})[name] = row["us"]
    return [Case(*key, {name: us[name] for of, name in ON_TENSORS if of == key[0] and name in us})
            for key, us in found.items()]  # fmt: skip


def points(known: Sequence[Case], date: str) -> list[MeasuredCollective]:
    """Points at the sizes that a calibration measures, as shipped."""
    source = f"{SOURCE}, {date[:10]}: median of ten rounds in turns"
    return [
        MeasuredCollective(
            operation=case.operation, algorithm=name, units=case.units, nbytes=case.nbytes, us=us, source=source
        )
        for case in known
        if is_calibrated(case)
        for name, us in case.us.items()
    ]


def is_calibrated(case: Case) -> bool:
    """Whether a calibration measures this size."""
    return (case.operation, case.nbytes) in tensors(case.units)


def shipped(data: Measured, known: Sequence[Case], date: str) -> Measured:
    """Shipped measurements with these points in place of earlier ones of the same file."""
    others = [point for point in data.collectives if not point.source.startswith(SOURCE)]
    return replace(data, collectives=(*others, *points(known, date)))


def able(machine: Machine, case: Case) -> list[str]:
    """Algorithms available to a program that names none: fewer than were measured."""
    with use_machine(machine):
        names = chosen_from(machine, case.units, case.operation, case.nbytes // 2 // case.units * case.units)
    return [name for name in names if name in case.us]


def by_points(machine: Machine, case: Case) -> str:
    """Choice of `select` with the shipped measurements: the one that programs get."""
    return select(machine, case.wanted, AvailableAlgorithms(tuple(able(machine, case)))).name


def by_description(machine: Machine, case: Case) -> str:
    """Choice without measurements: the fastest by estimate."""
    return first_of_the_fastest([(name, seconds(machine, case.wanted, name)) for name in able(machine, case)])


def table(machine: Machine, unseen: Sequence[Case]) -> str:
    """Quality of the choices, for each operation and for all, as Markdown."""
    heads = ("", "sizes", "as good, by points", "worst", "as good, by the description", "worst")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name in (*dict.fromkeys(case.operation for case in unseen), "all"):
        own = [case for case in unseen if name in (case.operation, "all")]
        cells = [name, str(len(own))]
        for choose in (by_points, by_description):
            regrets = regrets_of(machine, own, choose)
            cells += [f"{sum(regret <= REGRET for regret in regrets)}", f"{max(regrets):.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def regrets_of(machine: Machine, unseen: Sequence[Case], choose: Callable[[Machine, Case], str]) -> list[float]:
    """Losses of all cases, by a strategy of choice."""
    return [case.regret(choose(machine, case)) for case in unseen]


def with_table(page: str, text: str) -> str:
    """The page with the table between its markers."""
    begin, end = "<!-- measured: choices -->", "<!-- end -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n\n{text}\n\n{end}", page, flags=re.DOTALL)


def unseen(known: Sequence[Case]) -> list[Case]:
    """Cases of sizes that are not shipped as points."""
    return [case for case in known if not is_calibrated(case) and len(case.us) > 1]


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--machine", default="h200-sxm-8", show_default=True, help="Where it was measured.")
def main(machine: str) -> None:
    """Write the shipped points and the page, and show the table."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    known, path = cases(results["rows"]), DATA / f"{machine}.json"
    path.write_text(shipped(Measured.load(path), known, results["date"]).text, encoding="utf-8")
    text = table(Machine.load(machine), unseen(known))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
