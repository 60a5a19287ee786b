# SPDX-License-Identifier: MIT
"""Pages of collectives have the tables of records and results: `UPDATE_DOCS=1 pytest tests/collectives` writes them."""

from pathlib import Path

import pytest

from tests.collectives.algorithm_tables import OPERATIONS, kinds, operations, table
from tests.collectives.measured_tables import grid, kraken, link, measured, versions, windows
from tests.page_tables import compare_tables
from tilescale.backends.tilelang.lowering.implemented import IMPLEMENTED

DOCS = Path(__file__).parents[2] / "docs"
MADE = {
    "collectives.md": {"operations": operations(), "kinds": kinds(), "measured": measured(), "versions": versions()},
    "collectives/algorithms.md": {
        f"algorithms: {operation}": table(operation, lambda *key: key in IMPLEMENTED) for operation in OPERATIONS
    },
    "notes/collectives-measured.md": {"link": link(), "windows": windows(), "grid": grid(), "kraken": kraken()},
}
"""Page -> what follows each of its markers."""


@pytest.mark.parametrize("page", MADE)
def test_tables_are_those_of_the_records(page: str):
    compare_tables(DOCS / page, MADE[page])


def test_rows_say_what_is_sent():
    row = next(line for line in table("allreduce", lambda *key: False).splitlines() if "`ring`" in line)
    assert row.endswith("| tensors, tiles | - | 14 | 1.75 | - |")
