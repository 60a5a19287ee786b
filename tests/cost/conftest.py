# SPDX-License-Identifier: MIT
"""Settings of one test."""

from collections.abc import Callable, Iterator

import pytest

from tilescale.cost import calibrated
from tilescale.settings import settings


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets variables, and lets everybody look again at what is kept."""

    def change(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.cache_clear()
        calibrated.forget()

    yield change
    monkeypatch.undo()
    settings.cache_clear()
    calibrated.forget()
