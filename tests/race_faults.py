# SPDX-License-Identifier: MIT
"""Form of a race's results file, for the tests of writers and of stored files."""

from collections.abc import Iterable, Mapping
from typing import Any

from tilescale.tuning.race import KEYS, MODES, RATES


def faults(results: Any) -> list[str]:
    """Faults in the contents of a results file: none, in a good one."""
    if not isinstance(results, dict) or list(results) != ["machine", "versions", "date", "rows"]:
        return ["a results file has machine, versions, date, rows"]
    return [f"row {n}: {fault}" for n, row in enumerate(results["rows"]) for fault in _row_faults(row)]


def _row_faults(row: Mapping[str, Any]) -> Iterable[str]:
    if missing := [key for key in KEYS if key not in row]:
        yield f"has no {', '.join(missing)}"
        return
    if unknown := row.keys() - {*KEYS, *RATES, "failed", "date", "way"}:
        yield f"has {', '.join(sorted(unknown))}"
    if row["mode"] not in MODES:
        yield f"mode {row['mode']!r}"
    if (row["us"] is None) != ("failed" in row):
        yield "either a time or why there is none"
    if row["us"] is not None:
        low, high = row["spread"]
        if not 0 < low <= row["us"] <= high:
            yield "the median lies outside of the spread"
        if row["contender"] == row["baseline"] and row["ratio"] != 1:
            yield "the baseline's ratio to itself is not 1"
