# SPDX-License-Identifier: MIT
"""Settings of one test."""

from collections.abc import Callable, Iterator

import pytest

from tilescale.cost import calibrated
from tilescale.settings import settings


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set variables, and clear the caches that depend on them."""

    def change(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.cache_clear()
        calibrated.forget()

    yield change
    monkeypatch.undo()
    settings.cache_clear()
    calibrated.forget()
