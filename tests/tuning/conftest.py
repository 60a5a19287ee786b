# SPDX-License-Identifier: MIT
"""A cache of each test's own, and no bars."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tilescale.cost import calibrated
from tilescale.settings import settings


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of what is measured and tuned."""
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TILESCALE_PROGRESS", "off")
    settings.cache_clear()
    calibrated.forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    settings.cache_clear()
    calibrated.forget()
