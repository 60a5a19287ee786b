# SPDX-License-Identifier: MIT
"""What a check finds, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilescale.errors import TileScaleError

__all__ = ["Finding", "ask"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: what was looked at.
        works: whether it is as it should be; None where that makes no difference here.
        found: what is there, in a few words.
        remedy: what to do if it does not work.
    """

    name: str
    works: bool | None
    found: str
    remedy: str = ""


def ask(name: str, check: Callable[[], Finding]) -> Finding:
    """What a check finds. One that breaks has found that, too."""
    try:
        return check()
    except TileScaleError as error:
        return Finding(name, False, error.message, error.hint or "")
    except Exception as error:  # noqa: BLE001 - whatever a driver or a foreign library raises
        return Finding(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}")
