# SPDX-License-Identifier: MIT
"""The bench races operators against libraries, shows and draws it; on GPUs the same contenders are real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.race_faults import faults
from tilescale.cli import main
from tilescale.hda import Machine
from tilescale.tuning import bench, chart, curves
from tilescale.tuning.places import here
from tilescale.tuning.progress import ProgressSteps
from tilescale.tuning.race import KEYS
from tilescale.tuning.table import tables

H200 = Machine.load("h200-sxm-8")


def row(work: str, shape: list[int], contender: str, us: float | None, ratio: float | None) -> dict[str, Any]:
    spread, why = ([us, us], {}) if us is not None else (None, {"failed": "OutOfMemoryError: no"})
    values = (work, shape, "bfloat16", 2, "graph", contender, us, spread, "nccl", ratio)
    return {**dict(zip(KEYS, values, strict=True)), **why}


ROWS = [
    row("allreduce", [2048], "nccl", 10.0, 1.0),
    row("allreduce", [2048], "tilescale", 2.5, 0.25),
    row("allreduce", [1 << 20], "nccl", 20.0, 1.0),
    row("allreduce", [1 << 20], "tilescale", None, None),
    row("ag_gemm", [256, 512, 1024], "nccl", 30.0, 1.0),
]


def text_of(rows: list[dict[str, Any]]) -> list[str]:
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(tables(rows))
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def test_a_table_has_a_line_for_each_size_and_a_column_for_each_system():
    assert text_of(ROWS) == [
        "allreduce, graph, us",
        "        nccl      tilescale",
        "4 KiB     10   2.5 (0.25 x)",
        "2 MiB     20              -",
        "ag_gemm, graph, us",
        "                   nccl",
        "256 x 512 x 1024     30",
        "tilescale has no time: OutOfMemoryError: no",
    ]


def test_rows_of_both_works_have_the_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "ROWS", (0, 0, 256))
    small = {name: (operation, 512, 1024, program) for name, (operation, _, _, program) in bench.OPERATORS.items()}
    monkeypatch.setattr(bench, "OPERATORS", small)
    monkeypatch.setattr(bench, "SIZES", (4096,))
    results = bench.bench(here(H200, 2), ProgressSteps(), ["collectives", "operators"], quick=True)
    assert faults(results) == [] and not [r for r in results["rows"] if "failed" in r]
    times = {(r["work"], r["contender"]): r["us"] for r in results["rows"]}
    assert {work for work, _ in times} == {"put", "allreduce", "all_gather", "ag_gemm", "gemm_rs", "gemm_ar"}
    assert times["allreduce", "tilescale"] < times["allreduce", "nccl"]
    for work in ("ag_gemm", "gemm_rs", "gemm_ar"):
        assert times[work, "GEMM alone"] < times[work, "nccl, in order"]


def test_every_collective_at_every_size_has_its_systems():
    heats = list(bench.collectives(here(H200, 4), False))
    assert len(heats) == 1 + len(bench.OPERATIONS) * len(bench.SIZES)
    assert all([c.name for c in heat.contenders] == ["nccl", "tilescale"] for heat in heats[1:])
    sent = {heat.work: heat.bytes for heat in heats if heat.work != "put" and heat.shape == (2 << 20,)}
    half = 2 * (2 << 20) / 2
    assert sent["all_gather"] == sent["all_to_all"] == sent["reduce_scatter"] == 1.5 * half
    assert sent["allreduce"] == 3 * half and sent["broadcast"] == 2 * half


def test_pictures_need_no_put(tmp_path: Path):
    results = {"machine": {"gpu": "G", "gpus": 2}, "versions": {}, "date": "2026-11-22", "rows": ROWS[:3]}
    for number, draw in enumerate((curves.draw, chart.draw)):
        draw(results, tmp_path / f"{number}.svg")
        assert (tmp_path / f"{number}.svg").stat().st_size > 1000


def test_the_command_shows_writes_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "SIZES", (4096, 1 << 20))
    monkeypatch.setattr(bench, "OPERATIONS", ("allreduce",))
    out, drawn = tmp_path / "rows.json", tmp_path / "us.svg"
    words = ["bench", "collectives", "--units", "4", "--json", str(out), "--chart", str(drawn)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "4 x h200-sxm-8 (simulated)" in done.output and "allreduce, graph, us" in done.output
    assert faults(json.loads(out.read_text())) == [] and "<svg" in drawn.read_text()
    assert "tilescale bench collectives -n 2" in CliRunner().invoke(main, ["bench", "--help"]).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chart", "us.txt"], "us.txt"),
        (["matmuls"], "'collectives', 'operators'"),
        (["--units", "1"], "1 is not in the range"),
        (["--units", "99", "--machine", "h200-sxm-8"], "99 units: h200-sxm-8 has 8"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], message: str):
    done = CliRunner().invoke(main, ["bench", *words])
    assert done.exit_code == 2 and message in done.output
