# SPDX-License-Identifier: MIT
"""The page about transformers has the current table of families: `UPDATE_DOCS=1` with this test writes it."""

from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.page_tables import compare_tables

pytest.importorskip("transformers")

from tests.ops.family_tables import families  # noqa: E402 - it needs transformers

PAGE = Path(__file__).parents[2] / "docs" / "in-transformers.md"


@pytest.mark.slow
def test_the_table_of_families_is_current(mesh: DeviceMesh):
    compare_tables(PAGE, families(mesh))
