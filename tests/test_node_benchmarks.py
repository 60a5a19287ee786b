# SPDX-License-Identifier: MIT
"""Measurements of a server of GPUs: patterns of senders, and simulated times compared with measured ones."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tilescale

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    places = [str(FOLDER), str(FOLDER / "works")]
    sys.path[:0] = places
    yield importlib.import_module("patterns"), importlib.import_module("beside")
    for place in places:
        sys.path.remove(place)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["pair", "ring", "all to all", "all to one"])
def test_messages_reach_those_to_whom_they_are_sent(modules: Any, name: str, size: int):
    patterns, _ = modules
    sent = [torch.full((64,), rank + 1.0).bfloat16() for rank in range(size)]
    received = [torch.zeros(size, 64).bfloat16() for _ in range(size)]
    program = patterns.program(name, size, 64, "copy_engine")
    tilescale.emulate(program, [list(pair) for pair in zip(sent, received, strict=True)], machine="h200-sxm-8")
    for rank, rows in enumerate(received):
        senders = [sender for sender in range(size) if rank in patterns.receivers(name, sender, size)]
        assert rows[:, 0].tolist() == [sender + 1.0 if sender in senders else 0.0 for sender in range(size)]


def row(work: str, shape: list[int], us: float | None, **others: Any) -> dict[str, Any]:
    common = {"dtype": "bfloat16", "gpus": 4, "mode": "graph", "contender": "tilescale"}
    return {"work": work, "shape": shape, **common, "us": us, **others}


def test_simulated_times_stand_beside_what_can_be_simulated(modules: Any, tmp_path: Path):
    _, beside = modules
    wire = row("ring", [1 << 20], 10.0, contender="tilescale, stores", mode="eager")
    collectives = [row("allreduce", [1 << 16], 4.0), row("allreduce", [1 << 16], 9.0, contender="nccl")]
    collectives += [row("all_gather", [1 << 16], None), row("all_gather", [1 << 16], 8.0, mode="eager")]
    operators = [row("gemm_ar", [128, 1024, 1024], 20.0), row("ag_gemm", [1024, 512, 512], 30.0)]
    for name, rows in (("wires", [wire]), ("collectives", collectives), ("operators", operators)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    done = CliRunner().invoke(beside.main, [str(tmp_path), "--machine", "h200-sxm-8"])
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "predictions.json").read_text())["rows"]
    assert [(r["work"], r["us"]) for r in made] == [("ring", 10.0), ("allreduce", 4.0), ("ag_gemm", 30.0)]
    assert all(r["error"] == pytest.approx(r["simulated_us"] / r["us"] - 1, abs=5e-3) for r in made)
    off = sum(abs(r["simulated_us"] - r["us"]) for r in made) / 44
    assert f"{off:.1%}" in done.output


def test_a_folder_without_results_is_a_mistake(modules: Any, tmp_path: Path):
    done = CliRunner().invoke(modules[1].main, [str(tmp_path), "--machine", "h200-sxm-8"])
    assert done.exit_code == 2 and "nothing in" in done.output
