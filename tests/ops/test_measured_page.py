# SPDX-License-Identifier: MIT
"""The page of measured operators has the committed results: `UPDATE_DOCS=1` with this test writes them."""

from pathlib import Path

from tests.ops.measured_tables import tables
from tests.page_tables import compare_tables

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "operators-measured.md"


def test_tables_are_those_of_the_results():
    compare_tables(PAGE, tables())
