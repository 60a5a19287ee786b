# SPDX-License-Identifier: MIT
"""The records as tables of Markdown, for docs/collectives.md and docs/collectives/algorithms.md."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilescale.collectives.record import FORMS, Algorithm
from tilescale.collectives.table import names, records

OPERATIONS = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_v", "broadcast")

SHAPE = (2, 4)
"""Numbers of units for which rounds and bytes are counted."""

HEADS = ("`impl=`", "what it does", "for", "needs", "rounds", "sent", "on GPUs")


def table(operation: str, generated: Callable[[str, str, str], bool]) -> str:
    """The algorithms of an operation.

    Args:
        generated: whether there is code for GPUs, of an operation, a kind of collective, and an algorithm.
    """
    rows = [_row(records()[name], operation, generated) for name in names(operation)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (HEADS, ["---"] * len(HEADS), *rows))


def _row(record: Algorithm, operation: str, generated: Callable[[str, str, str], bool]) -> list[str]:
    plan = record.schedule(operation, SHAPE)
    pieces = plan.pieces
    sent = sum(np.bincount(r.source, r.count, minlength=plan.units) for r in plan.rounds)
    made = [form for form in record.kinds(operation) if generated(operation, form, record.name)]
    return [
        f"`{record.name}`",
        record.title,
        ", ".join(record.kinds(operation)),
        "; ".join(_needs(record, operation)) or "-",
        str(len(plan.rounds)),
        f"{float(np.max(sent)) / pieces:.3g}",
        ", ".join(made) or "-",
    ]


def _needs(record: Algorithm, operation: str) -> list[str]:
    needs, combines = [], operation in ("allreduce", "reduce_scatter")
    if record.power_of_two:
        needs.append("a power of two of units")
    if record.dtypes:
        needs.append(", ".join(record.dtypes))
    if record.library:
        needs.append(f"the library {record.library}")
    if record.by_host:
        needs.append("a mechanism that the host starts")
    if combines and not record.in_order:
        needs.append("no need of the emulator's bits")
    return needs


def operations() -> str:
    """The algorithms of each operation, those for tiles too first."""
    rows = [("operation", "`impl=` for whole tensors and tiles", "for whole tensors only"), ("---",) * 3]
    for operation in OPERATIONS:
        found: dict[bool, list[str]] = {True: [], False: []}
        for name in names(operation):
            found["tiles" in records()[name].kinds(operation)].append(f"`{name}`")
        rows.append((f"`T.{operation}`", *(", ".join(each) or "-" for each in found.values())))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def kinds() -> str:
    """The kinds of collective, as a list."""
    return "\n".join(f"- `{form}`: {words}" for form, words in FORMS.items())
