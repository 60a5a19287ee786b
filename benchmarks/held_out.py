# SPDX-License-Identifier: MIT
"""Estimates of held-out times, and their errors: `python benchmarks/held_out.py`.

Operators and collectives of `held_out_times.py` on H200: shapes of draws that nothing is fitted to. Each one was
measured when the model was finished, and showed what it lacked. Operators of `any_shape.py` give the share of the peak
of the tensor cores that power allows to each type. A calibration on H100 lacks half of its sizes between the smallest
and the largest. Choices among measured alternatives. Writes benchmarks/results/held_out.json, a figure, and tables of
docs/predictions.md and docs/notes/simulated-times.md.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import choices  # noqa: E402 - found through the path above

from tilescale.cost.choose import MEASURED_TIE, first_of_the_fastest  # noqa: E402
from tilescale.cost.measured import DATA, Measured, MeasuredCollective  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.hda.current import use_machine  # noqa: E402
from tilescale.ops import strategy  # noqa: E402
from tilescale.passes.overlap.tile_cost import rate_of  # noqa: E402

FOLDER = ROOT / "benchmarks" / "results"
RESULTS = FOLDER / "held_out.json"
PAGES = ROOT / "docs" / "predictions.md", ROOT / "docs" / "notes" / "simulated-times.md"
PICTURE = ROOT / "docs" / "diagrams" / "held-out.svg"

FIRST_DRAW, LATER = "held_out_times", ("second", "third", "fourth", "fifth")
LATER_DRAWS = {name: f"held_out_{name}" for name in LATER}
"""Results files of the draws: seeds 138, 238, 738, 1138 and 1338 of `held_out_times.py`."""

SEED = 38
SHARES = np.arange(0.7, 1.01, 0.01).round(2)
"""Shares of the rate of single GEMMs to choose from."""

CLOSE, REGRET = 0.2, 0.02
"""Error of a close estimate, and excess time of a good choice over the fastest, at most."""

COLLECTIVES = {"ag_gemm": "all_gather", "gated": "all_gather", "gemm_rs": "reduce_scatter", "gemm_ar": "allreduce"}
BESIDE, IN_ORDER, ONE_LAUNCH = "beside", "in order", "one launch"
ESTIMATES = {BESIDE: strategy.overlapped, IN_ORDER: strategy.in_order, ONE_LAUNCH: strategy.one_launch}


# -- operators ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operator of two ranks, its measured strategy, and the microseconds of that."""

    what: str
    job: strategy.CollectiveGemm
    way: str
    us: float

    @property
    def dtype(self) -> str:
        """Name of the type of its operands."""
        return strategy.dtype_name(self.job.dtype)

    def estimated(self, machine: Machine, way: str = "", share: float = 1.0) -> float:
        """Estimate microseconds of its strategy, or of another one; power limits the rate to a share of that of
        single GEMMs.
        """
        seconds = ESTIMATES[way or self.way](machine, self.job, 2)
        operations = 2 * 2 * self.job.rows * sum(self.job.columns) * self.job.K
        rate = rate_of(machine, self.dtype)
        return max(seconds, operations / (share * rate)) * 1e6


def operators(name: str) -> list[Case]:
    """Return the operators in graphs of a results file, sorted by title."""
    rows = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    made = [row for row in rows if row["mode"] == "graph" and row["work"] in COLLECTIVES]
    found = [_case(row, row.get("way", row["contender"])) for row in made]
    return sorted((case for case in found if case.way in ESTIMATES), key=lambda case: case.what)


def _case(row: dict[str, Any], way: str) -> Case:
    m, n, k = row["shape"]
    gated = row["work"] == "gated"
    columns = (n // 2, n // 2) if gated else (n,)
    job = strategy.CollectiveGemm(
        COLLECTIVES[row["work"]], -(-m // 2), columns, k, getattr(torch, row["dtype"]), gated, strategy.GATING * gated
    )
    return Case(f"{row['work']}, {row['dtype']}, {m} x {n} x {k}", job, way, row["us"])


def halves(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split a sequence by the seed: the half for the fit, and the held-out half."""
    drawn = random.Random(SEED).sample(items, len(items))
    return drawn[: len(items) // 2], drawn[len(items) // 2 :]


def fitted(machine: Machine, cases: Sequence[Case]) -> dict[str, float]:
    """Return the share of each type with the least error of its cases, weighted by time."""
    of_type: dict[str, list[Case]] = {}
    for case in cases:
        of_type.setdefault(case.dtype, []).append(case)

    def best(alike: list[Case]) -> float:
        times = {share: [(c.us, c.estimated(machine, share=share)) for c in alike] for share in SHARES.tolist()}
        return min(times, key=lambda share: weighted(times[share]))

    return {dtype: best(alike) for dtype, alike in of_type.items()}


# -- collectives -------------------------------------------------------------------------------------------------------


def unseen(machine: str, draw: str = FIRST_DRAW) -> tuple[Measured, list[choices.Case]]:
    """Return measurements of a machine, and measured collectives of other sizes: on H200 those of a draw."""
    shipped = Measured.load(DATA / f"{machine}.json")
    if machine.startswith("h200"):
        rows = json.loads((FOLDER / f"{draw}.json").read_text(encoding="utf-8"))["rows"]
        known = {point.nbytes for point in shipped.collectives}
        every = choices.cases(row for row in rows if row["work"] not in COLLECTIVES)
        return shipped, [case for case in every if case.nbytes not in known]
    sizes = sorted({point.nbytes for point in shipped.collectives})
    _, held = halves(sizes[1:-1])
    kept = tuple(point for point in shipped.collectives if point.nbytes not in held)
    return replace(shipped, collectives=kept), list(_cases(p for p in shipped.collectives if p.nbytes in held))


def _cases(points: Iterable[MeasuredCollective]) -> Iterator[choices.Case]:
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for point in points:
        found.setdefault((point.operation, point.units, point.nbytes), {})[point.algorithm] = point.us
    return (choices.Case(*key, us) for key, us in found.items())


# -- rows --------------------------------------------------------------------------------------------------------------


def row(what: str, measured: float, estimated: float) -> dict[str, Any]:
    """Return the entry of the results."""
    return {
        "what": what, "measured": measured, "estimated": float(f"{estimated:.4g}"),
        "off": round(estimated / measured - 1, 3),
    }  # fmt: skip


def operator_rows(machine: Machine, shares: Mapping[str, float], cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Estimate operators, each by its measured strategy."""
    return [
        row(f"{case.what}, {case.way}", case.us, case.estimated(machine, share=shares[case.dtype])) for case in cases
    ]


def collective_rows(data: Measured, cases: Iterable[choices.Case]) -> list[dict[str, Any]]:
    """Estimate every measured algorithm of each case."""
    return [
        row(f"{case.operation}, {name}, {case.nbytes} B", us, seconds * 1e6)
        for case in cases
        for name, us in case.us.items()
        if (seconds := data.collective_s(case.operation, name, case.units, case.nbytes)) is not None
    ]


def way_choices(machine: Machine, cases: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """Choose for operators with measured times of both strategies."""
    both: dict[str, dict[str, Case]] = {}
    for case in cases:
        both.setdefault(case.what, {})[case.way] = case
    for what, by_way in both.items():
        times = {way: case.us for way, case in by_way.items()}
        chosen = min(times, key=lambda way, case=by_way[BESIDE]: case.estimated(machine, way))
        yield {"what": what, "chosen": chosen, "regret": round(times[chosen] / min(times.values()) - 1, 3)}


def algorithm_choices(machine: Machine, data: Measured, cases: Iterable[choices.Case]) -> Iterator[dict[str, Any]]:
    """Choose algorithms as for a program without `impl=`."""
    for case in cases:
        able = [name for name in choices.able(machine, case) if name in case.us]
        times = [(name, data.collective_s(case.operation, name, case.units, case.nbytes)) for name in able]
        known = [(name, time) for name, time in times if time is not None]
        if not known:  # beyond the measured sizes
            continue
        chosen = first_of_the_fastest(known, MEASURED_TIE)
        regret = case.us[chosen] / min(case.us[name] for name in able) - 1
        yield {"what": f"{case.operation}, {case.nbytes} B", "chosen": chosen, "regret": round(regret, 3)}


def held_out() -> dict[str, Any]:
    """Return all estimates and choices, those of each later draw by themselves."""
    h200, h100 = Machine.load("h200-sxm-8"), Machine.load("h100-sxm-8")
    known = operators("any_shape")
    with use_machine(h200):
        shares = fitted(h200, known)
    later = {name: estimated(draw, shares, h200) for name, draw in LATER_DRAWS.items()}
    about = {"seed": SEED, "fitted_to": len(known), "shares": shares}
    return {**about, **estimated(FIRST_DRAW, shares, h200, h100), **later}


def estimated(draw: str, shares: Mapping[str, float], *machines: Machine) -> dict[str, Any]:
    """Return estimates and choices of a draw's operators on the first machine, and of collectives on all machines."""
    cases = operators(draw)
    with use_machine(machines[0]):
        groups = [group("Operators at random shapes", "2 x H200", operator_rows(machines[0], shares, cases))]
        chosen = [*way_choices(machines[0], cases)]
    for machine in machines:
        data, new = unseen(machine.name, draw)
        name = f"2 x {machine.name.partition('-')[0].upper()}"
        groups.append(group("Collectives of other sizes", name, collective_rows(data, new)))
        chosen += algorithm_choices(machine, data, new)
    return {"groups": groups, "choices": chosen}


def group(title: str, machine: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of the results."""
    return {"title": title, "machine": machine, "rows": rows}


# -- what that says ----------------------------------------------------------------------------------------------------


def weighted(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean error of pairs of measured and estimated times, weighted by the measured time."""
    return sum(abs(estimated - measured) for measured, estimated in pairs) / sum(measured for measured, _ in pairs)


def summary(rows: Sequence[dict[str, Any]]) -> tuple[int, float, float, float]:
    """Return the number of rows, their weighted and plain mean errors, and the share of close ones."""
    off = np.array([row["off"] for row in rows])
    mean = weighted([(row["measured"], row["estimated"]) for row in rows])
    return len(rows), mean, float(np.abs(off).mean()), float((np.abs(off) <= CLOSE).mean())


def good_choices(found: Sequence[dict[str, Any]]) -> float:
    """Return the share of good choices."""
    return sum(choice["regret"] <= REGRET for choice in found) / len(found)


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table of the errors of each group, and of all."""
    every = [row for group in results["groups"] for row in group["rows"]]
    parts = [(f"{group['title']}, {group['machine']}", group["rows"]) for group in results["groups"]]
    heads = ("", "times", "mean error, by time", "mean error", f"within {CLOSE:.0%}")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for title, rows in (*parts, ("all", every)):
        count, *shares = summary(rows)
        lines.append(f"| {title} | {count} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    chosen = results["choices"]
    good = f"{good_choices(chosen):.0%} of {len(chosen)} choices take at most {REGRET:.0%} longer than the fastest"
    return "\n".join([*lines, "", f"{good}; the worst takes {max(c['regret'] for c in chosen):.0%} longer."])


def together(results: dict[str, Any]) -> dict[str, Any]:
    """Return the groups and choices of all draws as those of one."""
    draws = results, *(results[name] for name in LATER_DRAWS)
    rows: dict[tuple[str, str], list[Any]] = {}
    for of in (of for part in draws for of in part["groups"]):
        rows.setdefault((of["title"], of["machine"]), []).extend(of["rows"])
    groups = [group(*key, of) for key, of in rows.items()]
    return {"groups": groups, "choices": [choice for part in draws for choice in part["choices"]]}


def with_tables(page: str, results: dict[str, Any]) -> str:
    """Return a page with the table of each draw, and of all, where it has markers for it."""
    parts = {"held_out": results, **{f"held_out_{name}": results[name] for name in LATER_DRAWS}}
    parts["held_out_all"] = together(results)
    for mark, part in parts.items():
        begin, end = f"<!-- measured: {mark} -->", "<!-- end -->"
        text = f"{begin}\n\n{table(part)}\n\n{end}"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=text: text, page, flags=re.DOTALL)
    return page


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw estimated over measured times, by the measured time."""
    matplotlib.rcParams["svg.hashsalt"] = "tilescale"  # the same file for the same data
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhspan(1 - CLOSE, 1 + CLOSE, color="#eeeeee")
    for colour, marker, of in zip(("#0072b2", "#d55e00", "#009e73"), "osd", results["groups"], strict=True):
        x, y = [row["measured"] for row in of["rows"]], [1 + row["off"] for row in of["rows"]]
        label = f"{of['title']}, {of['machine']}"
        axes.plot(x, y, marker, color=colour, markersize=4, alpha=0.7, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("measured, us")
    axes.set_ylabel("estimated / measured")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def text_of(results: dict[str, Any]) -> str:
    """Return the text of the results file, one row a line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\{\s+(\"what\"[^{}]*?)\s+\}", lambda m: "{" + re.sub(r"\s*\n\s*", " ", m[1]) + "}", text) + "\n"


@click.command(help=__doc__.split("\n\n")[0])
def main() -> None:
    results = held_out()
    RESULTS.write_text(text_of(results), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    draw(results, PICTURE)
    click.echo(f"shares of the rate of single GEMMs: {results['shares']}")
    for part in (results, *(results[name] for name in LATER_DRAWS), together(results)):
        click.echo(table(part))


if __name__ == "__main__":
    main()
