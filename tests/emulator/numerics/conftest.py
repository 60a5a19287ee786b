# SPDX-License-Identifier: MIT
"""Run every test as the interpreter runs the numerics: floating-point warnings ignored once, all others errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield
