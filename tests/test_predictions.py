# SPDX-License-Identifier: MIT
"""The committed predictions are those that the source makes now, close to what was measured, and on their page."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tilescale
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.ops.strategy import LATENCIES
from tilescale.passes.overlap.tile_cost import TileWork, rate_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
QUICK = ("cluster_gemm", "product_allreduce", "ag_gemm")
"""Races that are simulated in seconds."""


def script(name: str) -> ModuleType:
    """Load a script of the folder as a module: no module imports them by name."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def predictions() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    yield script("predictions")
    sys.path.remove(str(FOLDER))


def results() -> dict[str, Any]:
    return json.loads((FOLDER / "results" / "predictions.json").read_text())


def simulated_again(predictions: ModuleType, group: str, quick: Callable[[dict[str, Any]], bool]) -> int:
    """Simulate some rows of a group and compare; returns how many."""
    (reference,), (committed,) = (
        [g["rows"] for g in source["groups"] if g["name"] == group] for source in (predictions.reference(), results())
    )
    chosen = [(row, known) for row, known in zip(reference, committed, strict=True) if quick(row)]
    found = predictions.compare({"name": group, "rows": [row for row, _ in chosen]})
    for now, (_, known) in zip(found, chosen, strict=True):
        assert now["simulated"] == pytest.approx(known["simulated"], rel=1e-3), (
            f"{now['what']}: if this is meant, run benchmarks/predictions.py and read the difference"
        )
    return len(found)


def test_what_was_measured_is_what_was_committed(predictions: ModuleType):
    reference = predictions.reference()
    committed = results()
    assert [g["name"] for g in committed["groups"]] == [g["name"] for g in reference["groups"]]
    for group, measured in zip(committed["groups"], reference["groups"], strict=True):
        assert [row["measured"] for row in group["rows"]] == [row["measured"] for row in measured["rows"]]
        assert [row["what"] for row in group["rows"]] == [row["what"] for row in measured["rows"]]


def test_every_time_is_close_or_the_page_says_why_not(predictions: ModuleType):
    far = {g["name"] for g in results()["groups"] for row in g["rows"] if not predictions.is_close(row)}
    assert far == predictions.REASONS.keys(), "a reason for what is off, and none for what is not"
    every = [row for g in results()["groups"] for row in g["rows"]]
    assert sum(map(predictions.is_close, every)) > 0.75 * len(every)
    assert predictions.mean_error(results()["groups"]) <= 0.15


def test_the_pages_have_the_tables(predictions: ModuleType):
    pages = [page.read_text() for page in predictions.PAGES]
    assert [predictions.with_tables(page, results()) for page in pages] == pages, "run benchmarks/predictions.py"
    assert all(f"<!-- measured: {group['name']} -->" in pages[1] for group in results()["groups"])


@pytest.mark.parametrize("group", ["copy_engine", "signal", "allreduce_nccl", "allreduce_two_shot", "collectives"])
def test_simulated_times_are_those_of_this_source(predictions: ModuleType, group: str):
    assert simulated_again(predictions, group, lambda row: True) >= 4


def test_products_are_those_of_this_source(predictions: ModuleType):
    """Large ones take too long for a test."""
    assert simulated_again(predictions, "gemm", lambda row: row["shape"][0] <= 1024) >= 4


def test_raced_programs_are_those_of_this_source(predictions: ModuleType):
    assert simulated_again(predictions, "races", lambda row: row["work"] in QUICK) == 6


def test_forms_in_clusters_are_those_of_this_source(predictions: ModuleType):
    smallest = [4096, 3584, 8192]
    assert simulated_again(predictions, "forms", lambda r: r["form"] == "clusters" and r["shape"] == smallest) == 2


def test_clusters_are_simulated_as_they_are_estimated():
    """Within 5 %, by waves of tiles at the sustained rate; float8 has a longer epilogue, and 7 %."""
    machine = Machine.load("h200-sxm-8")
    rate, waits = rate_of(machine, "bfloat16") / machine.program_units, LATENCIES * machine.layer_for("global").latency
    (rows,) = [group["rows"] for group in results()["groups"] if group["name"] == "forms"]
    clusters = [row for row in rows if (row["form"], row["dtype"]) == ("clusters", "bfloat16")]
    assert len(clusters) == 4
    for row in clusters:
        m, n, k = row["shape"]
        work = TileWork(m // 128 * n // 256, 2 * 128 * 256 * k / rate + waits, machine.program_units)
        assert row["simulated"] == pytest.approx(work.seconds * 1e6, rel=0.05)


def test_the_form_that_is_simulated_to_be_fastest_is_fast():
    """Within 5 % of the form that was measured to be the fastest: tuning without a GPU takes it, clusters or others."""
    forms: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    (rows,) = [group["rows"] for group in results()["groups"] if group["name"] == "forms"]
    for row in rows:
        forms.setdefault((*row["shape"], row["dtype"]), []).append(row)
    assert len(forms) == 8 and all("clusters" in {row["form"] for row in each} for each in forms.values())
    for each in forms.values():
        chosen = min(each, key=lambda row: row["simulated"])
        assert chosen["measured"] <= 1.05 * min(row["measured"] for row in each)


@pytest.mark.parametrize("form", ["in turns", "clusters"])
def test_the_tiles_that_are_simulated_to_be_fastest_are_fast(form: str):
    """Within 5 % of the tiles and stages that were measured to be the fastest."""
    (rows,) = [group["rows"] for group in results()["groups"] if group["name"] == "tiles"]
    each = [row for row in rows if row["form"].startswith(form)]
    assert len(each) == 8
    least = min(row["simulated"] for row in each)
    chosen = [row["measured"] for row in each if row["simulated"] == least]  # stages may change nothing
    assert max(chosen) <= 1.05 * min(row["measured"] for row in each)


def test_tiles_are_those_of_this_source(predictions: ModuleType):
    assert simulated_again(predictions, "tiles", lambda r: r["form"] == "clusters, 128 x 256, 3 stages") == 1


def test_examples_are_those_of_this_source(predictions: ModuleType):
    assert simulated_again(predictions, "examples", lambda row: True)


def test_scaling_curves_are_those_of_this_source():
    scaling = script("scaling")
    committed = json.loads(scaling.RESULTS.read_text())["rows"]
    points = {(panel, machine.name, nbytes): machine for panel, machine, nbytes in scaling.cases()}
    assert {(row["panel"], row["machine"], row["bytes"]) for row in committed} == points.keys()
    assert max(row["simulated_in_s"] for row in committed) < 60
    sample = [row for row in committed if row["algorithm"] in ("halving_doubling", "hierarchical_doubling")][::9]
    assert any(row["units"] == 1024 for row in sample)
    for row in sample:
        machine = points[row["panel"], row["machine"], row["bytes"]]
        found = scaling.estimate(machine, machine.tensor_level.name, "allreduce", row["algorithm"], row["bytes"])
        assert found.seconds * 1e6 == pytest.approx(row["us"], rel=1e-3)


def test_simulated_decode_steps_are_those_of_this_source():
    """Machines with few programs are simulated again; no launch is left to fuse where programs own tensors."""
    layers = script("persistent_simulated")
    committed = json.loads(layers.RESULTS.read_text())["rows"]
    assert {row["machine"] for row in committed} == {*layers.MACHINES, layers.WAFER}
    for batch in layers.BATCHES:
        stacked = layers.layer(layers.by_device_and_block("stacked-3d"), batch)
        for name, found in (("stacked-3d", stacked), (layers.WAFER, layers.on_wafer(batch))):
            rows = [row for row in committed if (row["machine"], row["batch"]) == (name, batch)]
            known = {row["contender"]: row["us"] for row in rows}
            assert found == pytest.approx(known, rel=1e-3, abs=0.005)
    with tilescale.use_machine(layers.WAFER):
        program = layers.mlp(1)
    with pytest.raises(UnsupportedError, match="orders its units by itself"):
        tilescale.compile(program, machine=layers.WAFER, schedule="persistent")
