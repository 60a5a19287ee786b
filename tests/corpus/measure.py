# SPDX-License-Identifier: MIT
"""Detection rate of the emulator's checks on the corpus, in the default order of a run and in others.

    python -m tests.corpus.measure

writes benchmarks/results/corpus.json, and continues after an interruption; `UPDATE_DOCS=1 pytest tests/corpus` makes
the tables of docs/detection.md from it. A run is right where it names the mistake at its line, or, where there is none,
where it ends with the same values in all orders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.corpus.collection import PROGRAMS
from tests.corpus.record import LEVELS, SEEDS, SOURCES, Bench, Program

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "corpus.json"

HEADS = ("", "wrong programs", "found", "right programs", "false alarms", "precision", "recall", "by default order")


def measured(program: Program) -> dict[str, Any]:
    """A program's label, and which of its runs were right."""
    bench = Bench(program)
    first, *others = (bench.run(seed) for seed in (None, *SEEDS))
    is_wrong = program.error is not None
    right = [first.right, *(other.right and (is_wrong or same(first.values, other.values)) for other in others)]
    return {
        "kind": program.kind,
        "level": program.level,
        "source": program.origin.source.name,
        "wrong": is_wrong,
        "own order": right[0],
        "other orders": sum(right[1:]),
    }


def same(one: list, other: list) -> bool:
    """Whether two runs have left the same values."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# -- tables ------------------------------------------------------------------------------------------------------------


def rates(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Runs of wrong programs and those in which the mistake was found; runs of right ones and false alarms."""
    count = Counter()
    for row in rows:
        runs, right = 1 + len(SEEDS), row["own order"] + row["other orders"]
        what = ("wrong", "found") if row["wrong"] else ("right", "silent")
        count.update({what[0]: runs, what[1]: right, "programs " + what[0]: 1})
        count["own order"] += row["wrong"] and row["own order"]
    alarms = count["right"] - count["silent"]
    return {
        **count,
        "alarms": alarms,
        "precision": count["found"] / max(1, count["found"] + alarms),
        "recall": count["found"] / max(1, count["wrong"]),
        "recall in own order": count["own order"] / max(1, count["programs wrong"]),
    }


def _row(name: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    of = rates(rows)
    return [
        name,
        str(of["programs wrong"]),
        f"{of['found']} of {of['wrong']}",
        str(of["programs right"]),
        f"{of['alarms']} in {of['right']}",
        *(f"{100 * of[rate]:.1f} %" for rate in ("precision", "recall", "recall in own order")),
    ]


def _table(rows: Iterable[Iterable[str]], heads: Iterable[str]) -> str:
    heads = list(heads)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def _grouped(results: Mapping[str, Mapping], names: Iterable[str], of: Callable[[Mapping], str]) -> str:
    rows = [_row(name, [row for row in results.values() if of(row) == name]) for name in names]
    return _table([*rows, _row("all", results.values())], HEADS)


def tables(results: Mapping[str, Mapping]) -> dict[str, str]:
    """Tables of docs/detection.md for measured programs, by name."""
    kinds = dict.fromkeys(row["kind"] for row in results.values())
    counts = Counter(row["source"] for row in results.values())
    missed = [name for name, row in results.items() if row["wrong"] and not row["own order"] + row["other orders"]]
    return {
        "by kind": _grouped(results, kinds, lambda row: row["kind"]),
        "by level": _grouped(results, LEVELS, lambda row: row["level"]),
        "sources": _table(
            ([source.name, source.title, str(counts[source.name])] for source in SOURCES), ("", "", "programs")
        ),
        "missed": "\n".join(f"- `{name}`" for name in missed) or "- none",
    }


def main() -> None:
    """Measure the programs that the file does not have yet."""
    torch.set_num_threads(1)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = {program.name: known.get(program.name) for program in PROGRAMS}
    for program in PROGRAMS:
        results[program.name] = results[program.name] or measured(program)
        lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in results.items() if row is not None]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(tables(results)["by kind"])


if __name__ == "__main__":
    main()
