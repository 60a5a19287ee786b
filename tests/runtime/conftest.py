# SPDX-License-Identifier: MIT
"""The tests of the runtime emulate, on computers with GPUs too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilescale.settings import settings


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    settings.cache_clear()
    yield
    settings.cache_clear()
