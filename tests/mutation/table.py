# SPDX-License-Identifier: MIT
"""The results of mutation as tables of Markdown, for docs/notes/mutants.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.mutation.targets import ROOT, TARGETS

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"

CAUGHT, SURVIVES, TIMEOUT = "caught", "survives", "timeout"
"""Outcomes of a mutant."""

HEADS = ("", "mutants", "caught", "timeout", "score")


def score(rows: Iterable[Mapping[str, Any]]) -> float:
    """Share of mutants that are caught; timeouts do not count."""
    outcomes = [row["outcome"] for row in rows]
    return outcomes.count(CAUGHT) / max(1, len(outcomes))


def tables(results: Mapping[str, list]) -> dict[str, str]:
    """By name of the table: scores by part, and the mutants that no test has caught."""
    parts = dict.fromkeys(target.part for target in TARGETS)
    of = {part: [row for t in TARGETS if t.part == part for row in results.get(t.path, ())] for part in parts}
    rows = [
        *((part, rows) for part, rows in of.items() if rows),
        ("all", [row for rows in of.values() for row in rows]),
    ]
    cells = [[part, *_counts(rows), f"{100 * score(rows):.1f} %"] for part, rows in rows]
    table = "\n".join("| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *cells))
    left = [(path, row) for path, rows in results.items() for row in rows if row["outcome"] != CAUGHT]
    survivors = [f"- `{path}`, line {row['line']}{_late(row)}: `{row['what']}`" for path, row in left]
    return {"mutants": table, "survivors": "\n".join(survivors) or "- none"}


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    outcomes = [row["outcome"] for row in rows]
    return [str(len(rows)), *(str(outcomes.count(outcome)) for outcome in (CAUGHT, TIMEOUT))]


def _late(row: Mapping[str, Any]) -> str:
    return " (timeout)" if row["outcome"] == TIMEOUT else ""
