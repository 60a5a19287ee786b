# SPDX-License-Identifier: MIT
"""The page of collectives has the tables of the records: `UPDATE_DOCS=1 pytest tests/collectives` writes them."""

import os
import re
from pathlib import Path

from tilescale.backends.cuda.lowering.implemented import IMPLEMENTED
from tilescale.collectives import page

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
MADE = {"kinds": page.kinds()} | {
    f"algorithms: {operation}": page.table(operation, lambda *key: key in IMPLEMENTED) for operation in page.OPERATIONS
}
"""Marker -> what follows it."""


def with_tables(text: str) -> str:
    for marker, made in MADE.items():
        pattern = rf"<!-- {marker} -->\n+([|-] ?[^\n]*\n)*\n*"
        text, count = re.subn(pattern, lambda _, m=marker, made=made: f"<!-- {m} -->\n\n{made}\n\n", text)
        assert count == 1, marker
    return text.rstrip() + "\n"


def test_tables_are_those_of_the_records():
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(with_tables(text), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == with_tables(text), "run UPDATE_DOCS=1 pytest tests/collectives"


def test_rows_say_what_is_sent():
    row = next(line for line in page.table("allreduce", lambda *key: False).splitlines() if "`ring`" in line)
    assert row.endswith("| tensors, tiles | - | 14 | 1.75 | - |")
