# SPDX-License-Identifier: MIT
"""A machine of few blocks, so that each executes several tasks of a phase."""

import pytest

from tilescale.hda import Machine

FEW = 5


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """H200s with few SMs."""
    path = tmp_path_factory.mktemp("machine") / "small.yaml"
    path.write_text(f"extends: h200-sxm-8\ntitle: small\nlevels: {{block: {{count: {FEW}}}}}\n", encoding="utf-8")
    return Machine.load(path)
