# SPDX-License-Identifier: MIT
"""The page of collectives has the tables of the records: `UPDATE_DOCS=1 pytest tests/collectives` writes them."""

from pathlib import Path

from tests.collectives.algorithm_tables import OPERATIONS, kinds, table
from tests.page_tables import compare_tables
from tilescale.backends.cuda.lowering.implemented import IMPLEMENTED

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
MADE = {"kinds": kinds()} | {
    f"algorithms: {operation}": table(operation, lambda *key: key in IMPLEMENTED) for operation in OPERATIONS
}
"""Marker -> what follows it."""


def test_tables_are_those_of_the_records():
    compare_tables(PAGE, MADE)


def test_rows_say_what_is_sent():
    row = next(line for line in table("allreduce", lambda *key: False).splitlines() if "`ring`" in line)
    assert row.endswith("| tensors, tiles | - | 14 | 1.75 | - |")
