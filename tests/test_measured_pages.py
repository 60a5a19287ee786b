# SPDX-License-Identifier: MIT
"""Pages of measured times have the tables of the committed results; `UPDATE_DOCS=1` with these tests writes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from docs.figures import tables
from tests.page_tables import compare_tables

DOCS = Path(__file__).parents[1] / "docs"
MADE = {
    "../README": {"operators": tables.first_screen},
    "index": {"operators": tables.first_screen},
    "how-fast": {"operators": tables.operators},
    "one-launch": {"simulated layers": tables.simulated_layers},
    "operators/experts": {"experts": tables.experts, "float8 experts": tables.float8_experts},
    "notes/measured-races": {"races": tables.races},
    "notes/host-time": {"eager collectives": tables.eager_collectives},
    "notes/gemm-experiments": {"forms": tables.forms},
}
"""Page -> marker -> its table."""


@pytest.mark.parametrize("page", MADE)
def test_tables_are_those_of_the_results(page: str):
    made: dict[str, Callable[[], str]] = MADE[page]
    compare_tables(DOCS / f"{page}.md", {marker: make() for marker, make in made.items()})
