# SPDX-License-Identifier: MIT
"""Findings of a check, and the remedy for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilescale.errors import TileScaleError


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: the subject of the check.
        works: whether it is as it should be; None where that makes no difference here.
        found: the observation, in a few words.
        remedy: what to do if it does not work.
    """

    name: str
    works: bool | None
    found: str
    remedy: str = ""


def ask(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check; an exception in it is a finding, too."""
    try:
        return check()
    except TileScaleError as error:
        return Finding(name, False, error.message, error.hint or "")
    except Exception as error:  # noqa: BLE001 - any exception of a driver or a foreign library
        return Finding(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}")
