# SPDX-License-Identifier: MIT
"""The results of mutation as tables of Markdown, for docs/notes/mutants.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.targets import ROOT, TARGETS

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"

CAUGHT, SURVIVES, TIMEOUT = "caught", "survives", "timeout"
"""Outcomes of a mutant."""

HEADS = ("", "mutants", "tried", "caught", "equivalent", "timeout", "score")


def tables(results: Mapping[str, Any], equivalent: Mapping[str, Mapping[str, str]] = EQUIVALENT) -> dict[str, str]:
    """By name of the table: scores by part, and the mutants that no test has caught.

    Args:
        results: for each path the number of mutants, `of`, and the mutants that were `tried`, with their outcomes.
        equivalent: for each path the survivors that do what the original does, and why.
    """
    paths = {part: [t.path for t in TARGETS if t.part == part] for part in dict.fromkeys(t.part for t in TARGETS)}
    rows = [(part, {p: results[p] for p in of if p in results}) for part, of in paths.items()]
    cells = [[part, *_counts(found, equivalent)] for part, found in [*rows, ("all", results)] if found]
    table = "\n".join("| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *cells))
    left = [(path, row) for path, found in results.items() for row in found["tried"] if row["outcome"] != CAUGHT]
    same = {(path, row["what"]): equivalent.get(path, {}).get(row["what"]) for path, row in left}
    lines = {False: list[str](), True: list[str]()}
    for path, row in left:
        why = same[path, row["what"]]
        late = " (timeout)" if row["outcome"] == TIMEOUT else ""
        because = f": {why}" if why else ""
        lines[why is not None].append(f"- `{path}`, line {row['line']}{late}: `{row['what']}`{because}")
    return {
        "mutants": table,
        "survivors": "\n".join(lines[False]) or "- none",
        "equivalent": "\n".join(lines[True]) or "- none",
    }


def score(results: Mapping[str, Any], equivalent: Mapping[str, Mapping[str, str]] = EQUIVALENT) -> float:
    """Share of mutants that are caught, of those that are not equivalent; timeouts do not count."""
    outcomes = _outcomes(results, equivalent)
    return outcomes.count(CAUGHT) / max(1, len(outcomes) - outcomes.count("equivalent"))


def _counts(results: Mapping[str, Any], equivalent: Mapping[str, Mapping[str, str]]) -> list[str]:
    outcomes = _outcomes(results, equivalent)
    numbers = sum(found["of"] for found in results.values()), len(outcomes)
    counted = (outcomes.count(outcome) for outcome in (CAUGHT, "equivalent", TIMEOUT))
    return [*map(str, (*numbers, *counted)), f"{100 * score(results, equivalent):.1f} %"]


def _outcomes(results: Mapping[str, Any], equivalent: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [
        "equivalent" if row["outcome"] != CAUGHT and row["what"] in equivalent.get(path, {}) else row["outcome"]
        for path, found in results.items()
        for row in found["tried"]
    ]
