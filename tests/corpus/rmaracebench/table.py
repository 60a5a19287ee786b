# SPDX-License-Identifier: MIT
"""Outcomes of the benchmark's programs, and the tables that docs/detection.md shows of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "rmaracebench.json"

_HEADS = ("", "racy", "found (TP)", "missed (FN)", "correct", "silent (TN)", "false alarms (FP)", "not expressed")


def read() -> dict[str, Any]:
    """The recorded outcomes: version and commit of the benchmark, and a row for each program."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def write(benchmark: Mapping[str, str], rows: Mapping[str, Mapping]) -> None:
    """Record outcomes, a line for each program."""
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    head = json.dumps(dict(benchmark))
    RESULTS.write_text(f'{{"benchmark": {head},\n"programs": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether a program's race was found in the emulator's default order; None without a race."""
    return row["own order"]


def counts(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    """Racy programs, found, missed; correct ones, silent, false alarms; those that are not expressed."""
    rows = list(rows)
    run = [row for row in rows if row["reason"] is None]
    found = []
    for racy in (True, False):
        of = [row for row in run if row["racy"] is racy]
        right = sum(map(is_right, of))
        found += [len(of), right, len(of) - right]
    return [*found, len(rows) - len(run)]


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Tables of the page, by name."""
    programs = results["programs"]
    kinds = dict.fromkeys(name.partition("/")[0] for name in programs)
    lines = [[kind, *counts(row for name, row in programs.items() if name.startswith(f"{kind}/"))] for kind in kinds]
    body = [_HEADS, ["---"] * len(_HEADS), *lines, ["all", *counts(programs.values())]]
    return {
        "rmaracebench": "\n".join("| " + " | ".join(map(str, line)) + " |" for line in body),
        "rmaracebench wrong": _listed({name: _right(row) for name, row in programs.items() if _is_wrong(row)}),
        "rmaracebench not expressed": _listed({name: row["reason"] for name, row in programs.items() if row["reason"]}),
    }


def _is_wrong(row: Mapping[str, Any]) -> bool:
    return row["reason"] is None and not (is_right(row) and row["other orders"] == row["orders"])


def _right(row: Mapping[str, Any]) -> str:
    return f"as labelled in {row['own order'] + row['other orders']} of {row['orders'] + 1} orders"


def _listed(said: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {text}" for name, text in said.items()) or "- none"
