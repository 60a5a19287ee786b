# SPDX-License-Identifier: MIT
"""Pages of measured operators have the committed results: `UPDATE_DOCS=1` with these tests writes them."""

from pathlib import Path

from tests.ops.measured_tables import norms, tables
from tests.page_tables import compare_tables

NOTES = Path(__file__).parents[2] / "docs" / "notes"


def test_tables_are_those_of_the_results():
    compare_tables(NOTES / "operators-measured.md", tables())
    compare_tables(NOTES / "fused-norm.md", norms())
