# SPDX-License-Identifier: MIT
"""Simulated times compared with measured ones: `python benchmarks/predictions.py`.

Reads measurements from `benchmarks/reference/`, simulates the same work on the machine's description, writes both to
`benchmarks/results/`, and the tables of docs/predictions.md and docs/notes/simulated-times.md. Fails where an error
exceeds a quarter without a reason below.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import click
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import prediction_programs as programs  # noqa: E402 - in this folder
import prediction_races as races  # noqa: E402

import tilescale  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.hda.current import use_machine  # noqa: E402
from tilescale.hda.units import format_bytes  # noqa: E402

REFERENCE = ROOT / "benchmarks" / "reference" / "h200.json"
COLLECTIVES = ROOT / "benchmarks" / "results" / "collectives.json"
FORMS = ROOT / "benchmarks" / "results" / "products.json"
RACES = ROOT / "benchmarks" / "results" / "asynchrony.json"
RESULTS = ROOT / "benchmarks" / "results" / "predictions.json"
PAGES = ROOT / "docs" / "predictions.md", ROOT / "docs" / "notes" / "simulated-times.md"
CLOSE = 0.25

US, GB, TERA = 1e-6, 1e9, 1e12

TILINGS = [
    ((128, 256, 64), 4, 256),
    ((128, 128, 64), 4, 256),
    ((128, 64, 128), 4, 128),
    ((64, 64, 128), 4, 128),
]
"""Tile, stages and threads of GEMMs; small ones take the fastest, as libraries do."""

WAVES = 2
"""A GEMM is small if it has fewer tiles than this number for each resident block."""

REASONS = {
    "gemm_rate": (
        "launched from the host: a GEMM of this size probably ends before the host has launched the next one."
    ),
    "allreduce_one_shot": (
        "torch's kernel synchronizes at its start and its end by compare-and-swap on the peer's memory, a round trip "
        "each, and reads from the peers, a third one. The model has one barrier of one-way flags, and puts."
    ),
    "allreduce_two_shot": (
        "as for one-shot: two barriers of round trips, and reads from the peers, where the model has one-way flags and "
        "puts."
    ),
    "nccl_stream": (
        "includes the host, which takes some 25 us to launch NCCL on all GPUs. Descriptions cover the machine, not the "
        "host's software; inside a graph (above) the difference is gone. NCCL's all-to-all also stays below the "
        "bandwidth of a link."
    ),
    "collectives": (
        "the model has one latency for all collectives of 4 KiB; an all-gather takes less, for a cause that was not "
        "measured. Between 1 and 16 MiB a block makes a few transfers only. The model's link is saturated from the "
        "first one on. Ramp-up and drain of the link are a likely cause, and were not measured."
    ),
    "tiles": (
        "clusters with smaller tiles are slower than simulated. Both blocks synchronize at each step of K, and "
        "fewer operations hide that latency; this cause was not measured. The fastest tiles are the right ones."
    ),
    "sequence": "the host's launch of NCCL, as above; it matters where the GEMM is too short to hide it.",
}
"""Group -> reason why some of its rows are off by more than a quarter."""


# -- simulations: the fields of a row -> seconds -------------------------------------------------------------------


def simulated(program: Any, arguments: list[Any] | None = None) -> float:
    """Seconds of a program; with the arguments of one device, where it leaves extents open."""
    given = None if arguments is None else [arguments]
    return tilescale.emulate(program, given, machine=machine(), data=False, progress=False).time_us * US


@cache
def machine() -> Machine:
    """The machine of the measurements."""
    return Machine.load(json.loads(REFERENCE.read_text())["machine"])


def places() -> int:
    """Number of blocks of a large kernel that a device runs at once."""
    return machine().program_units


@cache
def gemm(m: int, n: int, k: int) -> float:
    """Seconds of a GEMM by the best of a few tilings."""
    (block_m, block_n, _), *_ = TILINGS[0]
    tiles = -(-m // block_m) * -(-n // block_n)
    tilings = TILINGS if tiles < WAVES * places() else TILINGS[:1]
    return min(simulated(programs.product(m, n, k, *tiling)) for tiling in tilings)


@cache
def collective(operation: str, nbytes: int, impl: str | None, devices: int = 8) -> float:
    return simulated(programs.COLLECTIVES[operation](nbytes // 2, devices, impl))


def copy_engine(nbytes: int, devices: int = 2) -> float:
    return simulated(programs.whole_copy(nbytes, devices))


SIZES = tuple(1 << n for n in (12, 16, 18, 20, 22, 24, 26, 28))
"""Bytes of this project's collectives."""

LARGE = 1 << 28
"""Bytes of transfers of which only the rate is known."""


def tiles(impl: str, way: str, blocks: int, devices: int = 2) -> float:
    """Seconds a byte that blocks move to or from the next device."""
    steps = LARGE // programs.TILE // blocks
    make = programs.tile_puts if way == "put" else programs.tile_gets
    return simulated(make(blocks, steps, impl, devices)) / (blocks * steps * programs.TILE)


def ring(impl: str, way: str, devices: int) -> float:
    """Simulated GB/s to the next device, with all resident blocks."""
    network = machine().network(machine().tensor_level.name)
    if network.mechanism(impl).started_by == "host":
        return LARGE / copy_engine(LARGE, devices) / GB
    return 1 / tiles(impl, way, places(), devices) / GB


def signal(nbytes: int) -> float:
    """Latency from the sender's store to the receiver's; the launch is not part of it."""
    program = programs.data_and_flag(nbytes) if nbytes else programs.flag_alone()
    return (simulated(program) - machine().tensor_level.launch) / US


def sequence(operation: str, nbytes: int, shape: list[int], devices: int = 8) -> float:
    return (gemm(*shape) + collective(operation, nbytes, "nccl", devices)) / US


def fused(operation: str, shape: list[int], devices: int) -> float:
    if operation == "all_gather":
        return simulated(programs.gather_and_multiply(*shape, devices, places())) / US
    return simulated(programs.multiply_and_scatter(*shape, devices)) / US


def race(work: str, shape: list[int], devices: int, form: str) -> float:
    with use_machine(machine()):
        return simulated(races.program(work, shape, devices, form)) / US


def form(form: str, dtype: str, shape: list[int]) -> float:
    with use_machine(machine()):
        return simulated(*races.form(form, dtype, *shape)) / US


SIMULATIONS: dict[str, Callable[..., float]] = {
    "gemm": lambda shape: gemm(*shape) / US,
    "gemm_rate": lambda shape: 2 * shape[0] * shape[1] * shape[2] / gemm(*shape) / TERA,
    "copy_engine": lambda nbytes: nbytes / copy_engine(nbytes) / GB,
    "stores": lambda blocks, impl, way: 1 / tiles(impl, way, blocks) / GB,
    "ring": ring,
    "signal": signal,
    **{
        name: lambda operation, impl, nbytes: collective(operation, nbytes, impl) / US
        for name in ("allreduce_nccl", "allreduce_one_shot", "allreduce_two_shot", "nccl_stream")
    },
    "collectives": lambda operation, nbytes: collective(operation, nbytes, None, 2) / US,
    "sequence": sequence,
    "fused": fused,
    "examples": lambda example, sizes, devices: simulated(programs.example(example, devices, sizes)) / US,
    "races": race,
    "forms": form,
    "tiles": form,
}
"""Group -> simulation of one of its rows, in the unit of the group."""


def reference() -> dict[str, Any]:
    """Measurements: by others' programs, and by `benchmarks/collectives.py`."""
    found = json.loads(REFERENCE.read_text())
    results = json.loads(COLLECTIVES.read_text())
    rows = [
        {"what": f"{work}, {format_bytes(nbytes)}", "operation": work, "nbytes": nbytes, "measured": row["us"]}
        for row in results["rows"]
        if row["contender"] == "tilescale" and row["mode"] == "graph" and (work := row["work"]) in programs.COLLECTIVES
        if (nbytes := 2 * row["shape"][0]) in SIZES
    ]
    method = f"{results['machine']['gpus']} x {results['machine']['gpu']}, in a graph; median of the rounds"
    own = {"name": "collectives", "unit": "us", "title": "Collectives of TileScale on two GPUs", "method": method}
    return {**found, "groups": [*found["groups"], {**own, "rows": rows}, raced(), formed(), tiled()]}


def raced() -> dict[str, Any]:
    """Measurements of whole programs by `benchmarks/asynchrony.py`."""
    results = json.loads(RACES.read_text())
    rows = [
        {
            "what": f"{races.TITLES[work, form]}, {' x '.join(map(str, row['shape']))}, {row['gpus']} GPU",
            "work": work, "shape": row["shape"], "devices": row["gpus"], "form": form, "measured": row["us"],
        }
        for row in results["rows"]
        if (form := row["contender"]) and ((work := row["work"]), form) in races.RACED
    ]  # fmt: skip
    method = f"{results['machine']['gpu']}, benchmarks/asynchrony.py, interleaved with libraries; median of the rounds"
    return {"name": "races", "unit": "us", "title": "Whole programs of TileScale", "method": method, "rows": rows}


FORM_TITLES = {
    "a block a tile": "one tile per block",
    "in turns": "persistent",
    "in turns, counted": "persistent, a signal per tile",
    "clusters": "clusters of two blocks",
}
"""Contender of `benchmarks/products.py` -> the form of its GEMM."""


PRODUCTS = "NVIDIA H200, benchmarks/products.py, interleaved with cuBLAS; median of the rounds"
"""GPU and method of these measurements."""


def formed() -> dict[str, Any]:
    """Measurements of forms of a GEMM by `benchmarks/products.py`."""
    rows = [
        {
            "what": f"{FORM_TITLES[row['contender']]}, {row['dtype']}, {' x '.join(map(str, row['shape']))}",
            "form": row["contender"], "dtype": row["dtype"], "shape": row["shape"], "measured": row["us"],
        }
        for row in _products("product_form")
    ]  # fmt: skip
    return {"name": "forms", "unit": "us", "title": "Forms of a GEMM on one GPU", "method": PRODUCTS, "rows": rows}


def tiled() -> dict[str, Any]:
    """Measurements of GEMMs with tiles of several sizes by `benchmarks/products.py`."""
    rows = [
        {
            "what": f"{FORM_TITLES[form]}, {tiles}, {' x '.join(map(str, row['shape']))}",
            "form": row["contender"], "dtype": row["dtype"], "shape": row["shape"], "measured": row["us"],
        }
        for row in _products("product_tiles")
        for form, _, tiles in [row["contender"].partition(", ")]
    ]  # fmt: skip
    return {"name": "tiles", "unit": "us", "title": "Tiles of a GEMM on one GPU", "method": PRODUCTS, "rows": rows}


def _products(work: str) -> list[dict[str, Any]]:
    rows = json.loads(FORMS.read_text())["rows"]
    return [row for row in rows if row["work"] == work and row["contender"] != row["baseline"]]


def compare(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a group with their simulated values and errors."""
    found = []
    for row in group["rows"]:
        fields = {name: value for name, value in row.items() if name not in ("what", "measured")}
        value = SIMULATIONS[group["name"]](**fields)
        found.append({**row, "simulated": float(f"{value:.4g}"), "off": round(value / row["measured"] - 1, 3)})
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def is_close(row: dict[str, Any]) -> bool:
    return abs(row["off"]) <= CLOSE


GIVEN = {"copy_engine", "stores", "ring", "signal"}
"""Groups from whose rows the description's numbers are derived: the others are predictions."""


def mean_error(groups: Iterable[dict[str, Any]]) -> float:
    """Mean magnitude of the errors of predicted times, each weighted by the measured time."""
    rows = [row for group in groups if group["name"] not in GIVEN and group["unit"] == "us" for row in group["rows"]]
    return sum(abs(row["simulated"] - row["measured"]) for row in rows) / sum(row["measured"] for row in rows)


def table(group: dict[str, Any], reasons: dict[str, str]) -> str:
    """Format a group as Markdown: its title, its table, and the reason where rows are off."""
    unit = group["unit"]
    lines = [f"{group['title']}. Measured: {group['method']}.", ""]
    lines += [f"| | measured, {unit} | simulated, {unit} | off by |", "|---|---:|---:|---:|"]
    for row in group["rows"]:
        mark = "" if is_close(row) else " \\*"
        lines.append(f"| {row['what']} | {row['measured']:g} | {row['simulated']:g} | {row['off']:+.0%}{mark} |")
    if not all(map(is_close, group["rows"])):
        lines += ["", f"\\* {reasons.get(group['name'], '')}"]
    return "\n".join(lines)


def with_tables(page: str, results: dict[str, Any], reasons: dict[str, str] = REASONS) -> str:
    """The page with the text between the markers of each group written again."""
    for group in results["groups"]:
        begin, end = f"<!-- measured: {group['name']} -->", "<!-- end -->"
        text = f"{begin}\n\n{table(group, reasons)}\n\n{end}"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=text: text, page, flags=re.DOTALL)
    for name, make in {"errors": errors, "accuracy": accuracy}.items():
        if (begin := f"<!-- {name} -->") in page:
            text = f"{begin}\n\n{make(results)}\n\n<!-- end -->"
            page = re.sub(f"{begin}.*?<!-- end -->", lambda _, text=text: text, page, flags=re.DOTALL)
    rows = [row for group in results["groups"] for row in group["rows"]]
    said = {"share": f"{sum(map(is_close, rows))} of {len(rows)}", "mean": f"{mean_error(results['groups']):.1%}"}
    for name, text in said.items():
        page = re.sub(f"<!-- {name} -->.*?<!-- end -->", f"<!-- {name} -->{text}<!-- end -->", page, flags=re.DOTALL)
    return page


def accuracy(results: dict[str, Any]) -> str:
    """The errors of each group of predictions, as Markdown."""
    lines = ["| | predictions | within 25 % | median error |", "|---|---:|---:|---:|"]
    for group in results["groups"]:
        rows = group["rows"]
        if group["name"] not in GIVEN:
            off = statistics.median(abs(row["off"]) for row in rows)
            lines.append(f"| {group['title']} | {len(rows)} | {sum(map(is_close, rows))} | {off:.0%} |")
    return "\n".join(lines)


def errors(results: dict[str, Any]) -> str:
    """The mean error of each group that has changed since the simulation in `before`, as Markdown."""
    before = results["before"]["errors"]
    lines = [f"| | rows | {results['before']['what']} | now |", "|---|---:|---:|---:|"]
    for group in results["groups"]:
        if group["name"] in before:
            now = mean_error([group])
            lines.append(f"| {group['title']} | {len(group['rows'])} | {before[group['name']]:.1%} | {now:.1%} |")
    return "\n".join(lines)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--only", metavar="TEXT", default="", help="Simulate groups whose name contains this; the others stay.")
def main(only: str) -> None:
    """Simulate, show, and write the results and the page."""
    measured = reference()
    committed = json.loads(RESULTS.read_text())
    known = {group["name"]: group for group in committed["groups"]} if only else {}
    console, groups, unexplained = Console(), [], []
    for group in measured["groups"]:
        if only not in group["name"]:
            groups.append(known[group["name"]])
            continue
        done = {**group, "rows": compare(group)}
        groups.append(done)
        console.print(f"{group['title']} ({group['unit']})")
        for row in done["rows"]:
            console.print(f"  {row['what']:<46} {row['measured']:>9g} {row['simulated']:>9g} {row['off']:>+8.1%}")
            if not is_close(row) and group["name"] not in REASONS:
                unexplained.append(f"{group['title']}: {row['what']}")
    if unexplained:
        raise click.ClickException("off by more than a quarter, and nothing says why:\n" + "\n".join(unexplained))
    results = {key: measured[key] for key in ("machine", "source")} | {"before": committed["before"], "groups": groups}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), results))


if __name__ == "__main__":
    main()
