# SPDX-License-Identifier: MIT
"""The results of mutation as tables of Markdown, for docs/detection.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.mutation.targets import ROOT, TARGETS

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"

HEADS = ("", "mutants", "caught", "score")


def score(rows: Iterable[Mapping[str, Any]]) -> float:
    """The share of mutants that are caught."""
    caught = [row["caught"] for row in rows]
    return sum(caught) / max(1, len(caught))


def tables(results: Mapping[str, list]) -> dict[str, str]:
    """By name of the table: scores by part, and the mutants that no test has caught."""
    parts = dict.fromkeys(target.part for target in TARGETS)
    of = {part: [row for t in TARGETS if t.part == part for row in results.get(t.path, ())] for part in parts}
    rows = [
        *((part, rows) for part, rows in of.items() if rows),
        ("all", [row for rows in of.values() for row in rows]),
    ]
    cells = [[p, str(len(r)), str(sum(x["caught"] for x in r)), f"{100 * score(r):.1f} %"] for p, r in rows]
    table = "\n".join("| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *cells))
    left = [(path, row) for path, rows in results.items() for row in rows if not row["caught"]]
    survivors = [f"- `{path}`, line {row['line']}: `{row['what']}`" for path, row in left]
    return {"mutants": table, "survivors": "\n".join(survivors) or "- none"}
