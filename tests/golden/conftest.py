# SPDX-License-Identifier: MIT
"""Golden texts: the output of a test must equal the stored text."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares a text with the stored `name`.txt; `--update-golden` stores it instead."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"there is no {path.name}: run pytest with --update-golden and look at what it wrote"
        stored = path.read_text(encoding="utf-8")
        assert text == stored, f"{path.name} differs; if that is meant: pytest --update-golden"

    return check
