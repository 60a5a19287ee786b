# SPDX-License-Identifier: MIT
"""Overlapped GEMMs over 8 devices against their bound, in simulated time.

The bound is the time of the longer one of GEMM and collective, and of one tile. Writes
`benchmarks/results/overlap_bound.json` and the table of docs/overlap.md. Fails where a time is over 10 % above the
bound.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tilescale  # noqa: E402
from tilescale.hda import Machine  # noqa: E402
from tilescale.tuning import programs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "overlap_bound.json"
PAGE = ROOT / "docs" / "overlap.md"
MACHINE = Machine.load("h200-sxm-8")
DEVICES, WIDE, INNER = 8, 28672, 8192
CLOSE = 1.1

Program = Callable[[Machine, int, tuple[int, int, int]], Any]

WORKS: dict[str, tuple[Program, str, tuple[int, int]]] = {
    "all-gather, then GEMM": (programs.gather_and_gemm, "all_gather", (WIDE // DEVICES, INNER)),
    "GEMM, then reduce-scatter": (programs.gemm_and_scatter, "reduce_scatter", (INNER, WIDE // DEVICES)),
}
"""Name of a work -> its program, the collective, and N and K of a device's GEMM."""


def simulated(program: Any) -> float:
    """Simulated time on the machine, in microseconds."""
    return tilescale.emulate(program, machine=MACHINE, data=False, progress=False).time_us


def row(work: str, rows: int) -> dict[str, Any]:
    """Times of one work, in microseconds."""
    make, collective, (n, k) = WORKS[work]
    program = make(MACHINE, DEVICES, (rows, n, k))
    moved = programs.collective(MACHINE, DEVICES, collective, rows * INNER, None)
    tile = (programs.BLOCK[0], programs.BLOCK[1], k)
    kernel = tilescale.compile(program, machine=MACHINE, schedule="overlap")
    parts = {
        "product": programs.product(MACHINE, DEVICES, (rows, n, k)),
        "collective": moved,
        "tile": programs.product(MACHINE, 1, tile),
        "in_order": program,
        "overlapped": kernel.ir,
    }
    times = {name: round(simulated(part), 1) for name, part in parts.items()}
    return {"work": work, "shape": [rows, n, k], "devices": DEVICES, **times}


def bound(times: dict[str, Any]) -> float:
    """Time of a perfect overlap, in microseconds."""
    return float(max(times["product"], times["collective"]) + times["tile"])


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    head = "| | M x N x K of a device | GEMM | collective | one tile | in order | overlapped | over the bound |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|"]
    for r in rows:
        cells = [r["work"], " x ".join(map(str, r["shape"]))]
        cells += [f"{r[name]:.0f}" for name in ("product", "collective", "tile", "in_order", "overlapped")]
        lines.append(f"| {' | '.join(cells)} | {r['overlapped'] / bound(r):.2f} |")
    return "\n".join(lines)


@click.command()
def main() -> None:
    """Simulate all works and write the results."""
    rows = [row(work, m) for work in WORKS for m in (4096, 8192)]
    lines = ",\n".join(f"  {json.dumps(r)}" for r in rows)
    RESULTS.write_text(f'{{\n "machine": "{MACHINE.name}",\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- measured: overlap -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda m: f"{m[1]}\n{table(rows)}\n\n{m[2]}", page), encoding="utf-8")
    if far := [r for r in rows if r["overlapped"] > CLOSE * bound(r)]:
        raise click.ClickException(f"over the bound: {far}")


if __name__ == "__main__":
    main()
