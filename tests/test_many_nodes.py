# SPDX-License-Identifier: MIT
"""The committed times on many nodes are those that the source simulates now, and on their page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.test_predictions import FOLDER, script


@pytest.fixture(scope="module")
def many_nodes() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield script("many_nodes")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def results(many_nodes: ModuleType) -> dict[str, Any]:
    return json.loads(many_nodes.RESULTS.read_text())


def test_what_was_published_is_what_was_committed(many_nodes: ModuleType, results: dict[str, Any]) -> None:
    published = json.loads(many_nodes.REFERENCE.read_text())["groups"]
    assert [named(group) for group in published] == [named(group) for group in results["groups"]]
    far = {group["name"] for group in results["groups"] if not all(map(many_nodes.is_close, group["rows"]))}
    assert far == many_nodes.REASONS.keys(), "a reason for what is off, and none for what is not"


def named(group: dict[str, Any]) -> dict[str, Any]:
    """A group without what is simulated."""
    rows = [{key: value for key, value in row.items() if key not in ("simulated", "off")} for row in group["rows"]]
    return {**group, "rows": rows}


AT_NIGHT = [pytest.mark.nightly, pytest.mark.slow]


@pytest.mark.parametrize("most", [0, pytest.param(128, marks=AT_NIGHT), pytest.param(1024, marks=AT_NIGHT)])
def test_published_rows_are_simulated_as_they_are_committed(
    many_nodes: ModuleType, results: dict[str, Any], most: int
) -> None:
    """By day those of single messages, at night also a layer of many tokens, whose grids have many blocks."""
    tried = 0
    for group in results["groups"]:
        rows = [row for row in named(group)["rows"] if row.get("tokens", 0) <= most]
        committed = [row for row in group["rows"] if row.get("tokens", 0) <= most]
        assert many_nodes.compare({**group, "rows": rows})["rows"] == committed
        tried += len(rows)
    assert tried > 15


def test_simulated_times_are_those_of_this_source(many_nodes: ModuleType, results: dict[str, Any]) -> None:
    """All on 16 GPUs, where a point takes a moment."""
    rows = [row for row in results["rows"] if row["units"] == 16 and row["scaling"] == "weak"]
    assert len(rows) == 11
    for row in rows:
        _, _, run = many_nodes.WORKLOADS[row["workload"]]
        assert row["us"] == pytest.approx(run(row["algorithm"], 2, 1) / many_nodes.US, rel=1e-3), row


def test_a_thousand_devices_are_within_reach(results: dict[str, Any]) -> None:
    """Committed, not measured again: going inside and then across wins on 1024 GPUs, at seconds to simulate."""
    last = [row for row in results["rows"] if row["units"] == 1024]
    assert len(last) == 22 and all(row["simulated_in_s"] < 60 for row in last)
    for workload in ("allreduce", "ag_gemm"):
        times = {row["algorithm"]: row["us"] for row in last if (row["workload"], row["scaling"]) == (workload, "weak")}
        assert times["hierarchical_doubling"] < times["hierarchical"] < times["rings"] < times["ring"]


def test_the_page_has_the_tables(many_nodes: ModuleType, results: dict[str, Any]) -> None:
    page = many_nodes.PAGE.read_text()
    assert many_nodes.with_results(page, results) == page, "run benchmarks/many_nodes.py"
